"""What has to be measured on a model before its plans can be made: moments, gradients, probes."""
