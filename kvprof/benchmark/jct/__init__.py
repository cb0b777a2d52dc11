"""Job completion time: real runs, composed runs, and what both are made of."""
