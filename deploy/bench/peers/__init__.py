"""Our engine against others on one machine: the same prompts on the same weights, in turns, in one run.

catalog        who the peers are: how each is installed and started
environments   their own virtual environments, in the cache folder; never ours
checkpoint     the weights as they want them
servers        started, frozen while others are measured, and stopped
clients        one question and what came of it, over gRPC or OpenAI's HTTP
turns          a workload on one server
comparison     turns in alternation, and the figures made of them
"""
