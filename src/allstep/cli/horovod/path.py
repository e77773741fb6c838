"""`allstep horovod-path`: print the folder from which `import horovod` imports allstep."""


def horovod_path() -> None:
    """Print the folder that replaces Horovod when it is first on PYTHONPATH.

    Scripts written for Horovod then run on allstep under mpirun, srun or torchrun. The folder's
    bin/ has horovodrun, for the PATH of job scripts.
    """
    from allstep.launch.horovod import FOLDER

    print(FOLDER)
