"""`allstep horovod-path`: where `import horovod` is answered by allstep."""


def horovod_path() -> None:
    """Print the folder to put first on PYTHONPATH, so that scripts written for Horovod run under
    mpirun, srun or torchrun.

    Its bin/ holds horovodrun, for the PATH of job scripts.
    """
    from allstep.launch.horovod import FOLDER

    print(FOLDER)
