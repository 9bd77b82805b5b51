"""What pediag costs, each number as a ratio to a peer measured beside it in the same run."""
