"""What tests share: fixtures that start ranks, hosts and clusters, makers of files, references."""
