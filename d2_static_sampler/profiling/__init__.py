"""What a step is made of: operations, waits, graphs and memory. For tools and tests alone."""
