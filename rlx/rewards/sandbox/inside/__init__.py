"""What runs within the walls: unit tests, and beside the program what lets tests call it, in two sandboxes.

The tests ask the program for what they do not define. Only plain data comes back, built anew from JSON, so that no
method of the program decides a comparison; other objects stay with the program, and the tests get a `Remote`. So a
program can neither see what is expected of it nor end or change the tests.
`values` has the messages between both sides, `program` and `unit_tests` are the sides. A copy of this package alone is
within the walls, so it imports nothing else of rlx. Left out: the walls.

Example:
    from rlx.rewards.sandbox.inside.values import decode, encode

    data = encode({"numbers": (1, 2)}, refer=lambda value: {"object": 0})
    assert data == {"dict": [["numbers", {"tuple": [1, 2]}]]}
    assert decode(data, resolve=lambda kind, content: None) == {"numbers": (1, 2)}
"""
