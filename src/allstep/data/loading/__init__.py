"""What works behind `allstep.data.loading.loader`: memory, threads, processes, bad samples."""
