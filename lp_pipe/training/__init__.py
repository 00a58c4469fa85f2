"""Parts that all kinds of training share: generators, devices, gradients, optimizer state, saved tensors."""
