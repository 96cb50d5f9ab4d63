"""Labels and losses over padded slots: tensors in, sums out. Nothing in here knows Detectron2."""
