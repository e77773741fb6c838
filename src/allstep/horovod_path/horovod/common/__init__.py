"""What Horovod's front-ends share."""
