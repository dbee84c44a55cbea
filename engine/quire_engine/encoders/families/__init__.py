"""How each family of models takes images: one file per family. Do not use torch."""
