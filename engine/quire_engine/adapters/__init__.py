"""LoRA adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685): small changes of a model's linear layers,
W + s·B·A, of which each request may name one.

::

    frontend      AdapterRegistry     names → folder, digest           checkpoint.py reads and checks the folder
        │  RequestOptions.adapter
    scheduler     AdapterScheduler    which adapters are in memory, which of them have a slot, and what waits
        │  SchedulerOutput.adapter_orders
    each rank     AdapterStore        loads them in a thread; puts them into slots of the layers' tables
"""
