"""Who meets whom, and what is there before: a generation, or nothing."""

from __future__ import annotations

from generations import ABSENT, FROZEN
from neighbours import Deed

MEETINGS = {
    "two that create": (Deed("create", 2), Deed("create", 3), ABSENT),
    "two that overwrite": (Deed("overwrite", 2), Deed("overwrite", 3), 1),
    "two that overwrite nothing": (Deed("overwrite", 2), Deed("overwrite", 3), ABSENT),
    "create, and overwrite": (Deed("create", 2), Deed("overwrite", 3), ABSENT),
    "overwrite, and create": (Deed("overwrite", 2), Deed("create", 3), ABSENT),
    "two in the background": (Deed("async", FROZEN + 2), Deed("async", FROZEN + 3), FROZEN),
    "two on one base": (
        Deed("incremental", FROZEN + 2),
        Deed("incremental", FROZEN + 3),
        FROZEN,
    ),
    "a base that is replaced": (
        Deed("incremental", FROZEN + 2),
        Deed("overwrite", FROZEN + 3),
        FROZEN,
    ),
    "gc beside a save": (Deed("overwrite", 2), Deed("gc"), 1),
    "gc beside a first save": (Deed("create", 2), Deed("gc"), ABSENT),
    "gc that takes a save for dead": (Deed("overwrite", 2), Deed("gc of all"), 1),
    "gc that takes a first save for dead": (Deed("create", 2), Deed("gc of all"), ABSENT),
    "gc that takes one on a base for dead": (
        Deed("incremental", FROZEN + 2),
        Deed("gc of all"),
        FROZEN,
    ),
    "a save beside gc": (Deed("gc of all"), Deed("overwrite", 2), 1),
    "a first save beside gc": (Deed("gc of all"), Deed("incremental", FROZEN + 2), FROZEN),
    "load of what is replaced": (Deed("load", 1), Deed("overwrite", 2), 1),
    "load of what is replaced by its like": (
        Deed("load", FROZEN),
        Deed("incremental", FROZEN + 2),
        FROZEN,
    ),
    "load beside gc": (Deed("load", 1), Deed("gc of all"), 1),
    "open of what is replaced": (Deed("open"), Deed("overwrite", 2), 1),
    "open of what is removed": (Deed("open"), Deed("remove"), 1),
    "verify of what is replaced": (Deed("verify"), Deed("overwrite", 2), 1),
    "two that export": (Deed("export", 2), Deed("export", 3), 1),
    "two that export first": (Deed("export", 2), Deed("export", 3), ABSENT),
    "read of what is exported over": (Deed("read"), Deed("export", 2), 1),
    "two that convert": (Deed("convert to native", 2), Deed("convert to native", 3), 1),
    "two that convert first": (Deed("convert to hf", 2), Deed("convert to hf", 3), ABSENT),
    "two that convert the same": (Deed("convert to hf", 2), Deed("convert to hf", 2), 1),
    "a save into what is removed": (Deed("overwrite", 2), Deed("remove"), 1),
}
