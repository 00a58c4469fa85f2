"""An experiment as a program, with a node for each part."""
