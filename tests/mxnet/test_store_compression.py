"""Compressed pushes against MXNet's own distributed store: scheduler, server and worker."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import allstep.kvstore
from support.ranks import clean_environment

needs_old_numpy = pytest.mark.skipif(
    int(np.__version__.partition(".")[0]) > 1,
    reason="MXNet's server unpickles what numpy 2 cannot read: `make peers` has numpy 1.23.5",
)
STEPS, NUMEL, THRESHOLD = 6, 1003, 0.5

PROGRAM = f"""
import sys
import numpy as np
np.bool = bool
import mxnet as mx

kv = mx.kv.create("dist_sync")
kv.set_gradient_compression({{"type": "2bit", "threshold": {THRESHOLD}}})
kv.init("w", mx.nd.zeros({NUMEL}))
found, out = [], mx.nd.zeros({NUMEL})
for gradient in np.load(sys.argv[1]):
    kv.push("w", mx.nd.array(gradient))
    kv.pull("w", out=out)
    found.append(out.asnumpy())
np.save(sys.argv[2], np.stack(found))
"""


def mxnets(gradients: np.ndarray, folder: Path) -> np.ndarray:
    """Return the value after each push: what MXNet's server has decoded."""
    np.save(folder / "gradients.npy", gradients)
    (folder / "program.py").write_text(PROGRAM)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    env = {
        **clean_environment(),
        "PYTHONWARNINGS": "ignore",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "1",
        "DMLC_NODE_HOST": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "program.py", "gradients.npy", "found.npy"]
    roles = [
        subprocess.Popen(command, cwd=folder, env={**env, "DMLC_ROLE": role})
        for role in ("scheduler", "server", "worker")
    ]
    try:
        assert [role.wait(timeout=90) for role in roles] == [0, 0, 0]
    finally:
        for role in roles:
            role.kill()
    return np.asarray(np.load(folder / "found.npy"))


@needs_old_numpy
@pytest.mark.usefixtures("peers", "processes")
def test_2bit_pushes_are_decoded_as_by_mxnets_server(tmp_path: Path) -> None:
    gradients = np.random.default_rng(0).normal(size=(STEPS, NUMEL)).astype(np.float32)
    # On the threshold, and next to it.
    near = np.nextafter(np.float32(THRESHOLD), np.float32(0))
    gradients[0, :4] = [THRESHOLD, -THRESHOLD, near, -near]
    expected = mxnets(gradients, tmp_path)
    with allstep.kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
        kv.init("w", torch.zeros(NUMEL))
        out = torch.empty(NUMEL)
        for gradient, value in zip(gradients, expected, strict=True):
            kv.pushpull("w", torch.from_numpy(gradient), out=out)
            assert np.array_equal(out.numpy(), value)
