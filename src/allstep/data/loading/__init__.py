"""What works behind `allstep.data.loader`: memory, threads, processes, bad samples."""
