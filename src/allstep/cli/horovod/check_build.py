"""`horovodrun --check-build`: show what is built in, in the format of horovodrun."""

from allstep.launch.horovod import API_VERSION


def table() -> str:
    """Return the table of frameworks, controllers and tensor operations.

    A framework is available if it is installed. allstep's launcher starts the workers, and CPU
    tensors go through Gloo's process group and its own.
    """
    from allstep.hvd import util
    from allstep.hvd.frameworks import MXNET, TENSORFLOW, TORCH

    parts: dict[str, dict[str, bool | int | None]] = {
        "Frameworks": {each.name: each.version is not None for each in (TENSORFLOW, TORCH, MXNET)},
        "Controllers": {"MPI": util.mpi_built(), "Gloo": util.gloo_built()},
        "Tensor Operations": {
            "NCCL": util.nccl_built(),
            "DDL": util.ddl_built(),
            "CCL": util.ccl_built(),
            "MPI": util.mpi_built(),
            "Gloo": util.gloo_built(),
        },
    }
    lines = [f"Horovod v{API_VERSION}:"]
    for title, entries in parts.items():
        lines += ["", f"Available {title}:"]
        lines += [f"    [{'X' if built else ' '}] {name}" for name, built in entries.items()]
    return "\n".join(lines)
