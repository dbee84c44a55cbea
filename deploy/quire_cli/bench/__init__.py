"""`quire bench …` and `quire tune`: a load on a server (`serve`), an engine without one (`offline`), and a search."""
