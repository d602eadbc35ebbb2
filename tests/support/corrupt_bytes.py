"""Random damage to a file."""


def corrupt_bytes(data, generator):
    """Flip bits, cut, insert, repeat or blank a piece."""
    data, at = bytearray(data), generator.randrange(len(data))
    match generator.randrange(6):
        case 0:
            for _ in range(generator.randrange(1, 9)):
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = generator.randbytes(generator.randrange(1, 50))
        case 3:
            del data[at : at + generator.randrange(1, 50)]
        case 4:
            data[at:at] = data[at : at + generator.randrange(1, 50)]
        case 5:
            data[at : at + 8] = bytes(8)
    return bytes(data)
