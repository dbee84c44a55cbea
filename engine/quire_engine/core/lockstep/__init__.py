"""Lockstep: engines that share the experts of a model, and therefore compute every step together.

::

    LockstepClient ─┬─ Owner: the memory that the engines meet in; ends a generation when one dies
                    ├─ SupervisedClient 0 ─► LockstepProcess ─► EngineCore ─► its ranks ─┐ meet in every layer
                    └─ SupervisedClient 1 ─► LockstepProcess ─► EngineCore ─► its ranks ─┘ with experts

1. Before each step the engine cores meet, and each says whether it has work. If any has, all compute: an engine
   without work lends its experts. If none has, the wave ends, and all block until one is sent a request: it comes to
   the next meeting, which calls the others.
2. A request cannot be lost at the end of a wave: what came too late for one meeting is said at the next, which any
   engine may call.
3. When an engine dies the front ends the generation, and the others' steps with it. They keep their weights, compute
   again what was running, and come to the next meeting, where they wait for the engine that is started in its place.
   The requests of the dead one go on on the others, from the journal. No other engine has died, so their
   requests are no suspects.
4. A step that fails in one engine ends the generation as well: it finds the request that is to blame as it would alone.
"""
