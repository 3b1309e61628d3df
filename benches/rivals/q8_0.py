"""Writes a GGUF file anew with all its matrices in Q8_0: `python3 q8_0.py IN.gguf OUT.gguf` (`pip install gguf`)."""

import sys

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, Keys, quants


def main(source, out):
    reader = GGUFReader(source)
    writer = GGUFWriter(out, arch=reader.fields[Keys.General.ARCHITECTURE].contents())
    for name, field in reader.fields.items():
        if name not in (Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE) and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        kind = GGMLQuantizationType.Q8_0 if len(tensor.shape) == 2 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
