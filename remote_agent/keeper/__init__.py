"""``keeper``: holds descriptors and nothing else, so that what they stand for outlives whoever made it.

It holds the NVIDIA device files, which keeps the driver's state loaded, and the memory of *residents*: models
whose loader may be dead. Standard library alone, no CUDA, never upgraded with agentd. So its words never change.
One line asks; ``ok COUNT PID`` or ``error TEXT`` answers. COUNT is device files but where said otherwise.

==============  ================================================================================================
``hold``        opens the device files
``release``     closes them; refused while residents are held, whose memory would go with the driver's state
``status``      asks
``stop``        ends the keeper; refused while residents are held
``stop!``       ends it all the same, and drops them
``put NAME``    comes with 2 to 16 descriptors, a manifest first, and holds them; COUNT is residents
``list``        COUNT lines follow, one a resident: ``NAME DESCRIPTORS PID...``, the pids of those attached
``show NAME``   the answer carries the manifest
``get NAME``    the answer carries every descriptor, COUNT of them; the open connection is the *lease*
``drop NAME``   closes a resident's descriptors; refused while a lease is open; COUNT is residents
``drop! NAME``  closes them all the same, and every lease
==============  ================================================================================================

A lease ends with its connection, so an attacher's death frees nothing and leaks nothing. Other users may ask
``list``, ``show`` and ``get`` on a socket of its own (see `access`). A keeper whose socket was removed can't be
reached any more: it ends.
"""

ALREADY_RUNS = 3
"""Exit code of a keeper that found another one."""
