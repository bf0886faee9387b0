# SPDX-License-Identifier: Apache-2.0
"""Runs and steps: when to save, what to keep, where to resume.

checking    what a manager is given
naming      what a step's directory is called
steps       one step, and what a folder of them holds
catalog     what is there, learnt from the directory and from nothing else
tiers       a fast folder before the durable one, seen as one
belonging   which run a fast folder is of
saving      policies that say when to save
keeping     policies that say what to keep
pins        what is being read, or held for good, is not removed
removal     a step goes: in one move, and then byte by byte
cleaning    what killed saves and killed removals left
retention   the pass over a run that does both, and the thread behind the program
wanted      what is to be copied, and what may leave which tier
publishing  a step is copied to another folder, and appears there as a whole
copier      the thread that has it done
upkeep      all of this for the tiers of a run
deciding    decisions that all ranks take alike
restoring   the newest whole step, on all ranks
waiting     steps as they appear, for who evaluates
driver      `CheckpointManager`: the order of all this, and nothing else
"""
