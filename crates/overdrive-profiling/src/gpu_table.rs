//! What NVIDIA's GPUs multiply at most.
//!
//! Dense products (no structured sparsity) at boost clock from NVIDIA's data sheets and the white
//! papers of the generations. On consumer and workstation cards the half-precision figures are those
//! with fp32 accumulation, which training uses; where a sheet gives only the sparse figure, half of it.

use tch::Kind;

/// Peaks of one GPU in TFLOP/s; 0 where it has no such unit.
struct Row {
    /// Words that its name holds, all of them, in lower case.
    words: &'static [&'static str],
    fp32: f64,
    tf32: f64,
    /// fp16 and bf16, which every GPU that has both multiplies equally fast.
    half: f64,
}

const fn row(words: &'static [&'static str], fp32: f64, tf32: f64, half: f64) -> Row {
    Row {
        words,
        fp32,
        tf32,
        half,
    }
}

/// Of the rows that fit a name, the one with the most words counts.
const ROWS: &[Row] = &[
    // Pascal, Volta, Turing: no TF32 and no bf16.
    row(&["p100"], 9.3, 0.0, 18.7),
    row(&["p100", "sxm2"], 10.6, 0.0, 21.2),
    row(&["v100", "sxm2"], 15.7, 0.0, 125.0),
    row(&["v100", "sxm3"], 15.7, 0.0, 125.0),
    row(&["v100"], 14.0, 0.0, 112.0),
    row(&["v100s"], 16.4, 0.0, 130.0),
    row(&["t4"], 8.1, 0.0, 65.0),
    row(&["titan", "rtx"], 16.3, 0.0, 130.5),
    row(&["quadro", "6000"], 16.3, 0.0, 130.5),
    row(&["quadro", "8000"], 16.3, 0.0, 130.5),
    row(&["2080", "ti"], 13.4, 0.0, 53.8),
    // Ampere.
    row(&["a100"], 19.5, 156.0, 312.0),
    row(&["a800"], 19.5, 156.0, 312.0),
    row(&["a30"], 10.3, 82.0, 165.0),
    row(&["a40"], 37.4, 74.8, 149.7),
    row(&["a10"], 31.2, 62.5, 125.0),
    row(&["a10g"], 31.5, 35.0, 70.0),
    row(&["a2"], 4.5, 9.0, 18.0),
    row(&["a6000"], 38.7, 77.4, 154.8),
    row(&["a5000"], 27.8, 55.6, 111.1),
    row(&["a4000"], 19.2, 38.3, 76.7),
    row(&["3090"], 35.6, 35.6, 71.2),
    row(&["3090", "ti"], 40.0, 40.0, 80.0),
    row(&["3080"], 29.8, 29.8, 59.5),
    row(&["3080", "ti"], 34.1, 34.1, 68.2),
    row(&["3070"], 20.3, 20.3, 40.6),
    row(&["3060"], 12.7, 12.7, 25.5),
    row(&["3060", "ti"], 16.2, 16.2, 32.4),
    // Ada.
    row(&["l4"], 30.3, 60.5, 121.0),
    row(&["l40"], 90.5, 90.5, 181.0),
    row(&["l40s"], 91.6, 183.0, 362.0),
    row(&["6000", "ada"], 91.1, 182.1, 364.2),
    row(&["4090"], 82.6, 82.6, 165.2),
    row(&["4080"], 48.7, 48.7, 97.5),
    row(&["4080", "super"], 52.2, 52.2, 104.4),
    row(&["4070"], 29.1, 29.1, 58.3),
    row(&["4070", "ti"], 40.1, 40.1, 80.2),
    row(&["4070", "ti", "super"], 44.1, 44.1, 88.2),
    row(&["4060"], 15.1, 15.1, 30.2),
    row(&["4060", "ti"], 22.1, 22.1, 44.1),
    // Hopper.
    row(&["h100"], 67.0, 494.7, 989.4),
    row(&["h100", "pcie"], 51.0, 378.0, 756.0),
    row(&["h100", "nvl"], 60.0, 417.5, 835.5),
    row(&["h800"], 67.0, 494.7, 989.4),
    row(&["h200"], 67.0, 494.7, 989.4),
    row(&["h200", "nvl"], 60.0, 417.5, 835.5),
    row(&["gh200"], 67.0, 494.7, 989.4),
    row(&["h20"], 44.0, 74.0, 148.0),
    // Blackwell.
    row(&["b200"], 75.0, 1125.0, 2250.0),
    row(&["gb200"], 80.0, 1250.0, 2500.0),
    row(&["5090"], 104.8, 104.8, 209.5),
    row(&["5080"], 56.3, 56.3, 112.6),
    row(&["5070"], 30.9, 30.9, 61.7),
    row(&["5070", "ti"], 43.9, 43.9, 87.9),
];

/// Words of a name that make it another, slower GPU than the one the row means.
const OTHERS: [&str; 4] = ["laptop", "mobile", "mig", "max"];

/// What the GPU that calls itself `name` can do in products of `dtype` (fp32 ones in TF32 with
/// `tf32`), in floating-point operations a second; `None` where the table does not know it.
pub(crate) fn peak(name: &str, dtype: Kind, tf32: bool) -> Option<f64> {
    let name = name.to_ascii_lowercase();
    let words: Vec<&str> = name
        .split(|letter: char| !letter.is_ascii_alphanumeric())
        .collect();
    if OTHERS.iter().any(|other| words.contains(other)) {
        return None;
    }
    let row = ROWS
        .iter()
        .filter(|row| row.words.iter().all(|word| words.contains(word)))
        .max_by_key(|row| row.words.len())?;
    let tera = match dtype {
        Kind::Float if tf32 && row.tf32 > 0.0 => row.tf32,
        Kind::Float => row.fp32,
        // Without TF32 the row is of a GPU before Ampere, which multiplies no bf16.
        Kind::BFloat16 if row.tf32 == 0.0 => return None,
        Kind::Half | Kind::BFloat16 => row.half,
        _ => return None,
    };
    Some(tera * 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_known_by_the_names_that_they_give_themselves() {
        for (name, tera) in [
            ("Tesla P100-PCIE-16GB", 18.7),
            ("Tesla V100-SXM2-32GB", 125.0),
            ("Tesla V100-PCIE-16GB", 112.0),
            ("Tesla T4", 65.0),
            ("Quadro RTX 6000", 130.5),
            ("NVIDIA A100-SXM4-80GB", 312.0),
            ("NVIDIA A100 80GB PCIe", 312.0),
            ("NVIDIA A10G", 70.0),
            ("NVIDIA A10", 125.0),
            ("NVIDIA RTX A6000", 154.8),
            ("NVIDIA GeForce RTX 3090", 71.2),
            ("NVIDIA GeForce RTX 3090 Ti", 80.0),
            ("NVIDIA L4", 121.0),
            ("NVIDIA L40S", 362.0),
            ("NVIDIA RTX 6000 Ada Generation", 364.2),
            ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
            ("NVIDIA GeForce RTX 4090", 165.2),
            ("NVIDIA H100 80GB HBM3", 989.4),
            ("NVIDIA H100 PCIe", 756.0),
            ("NVIDIA H200", 989.4),
            ("NVIDIA GH200 480GB", 989.4),
            ("NVIDIA B200", 2250.0),
            ("NVIDIA GeForce RTX 5090", 209.5),
        ] {
            let known = peak(name, Kind::Half, false).map(|flops| flops / 1e12);
            assert_eq!(known, Some(tera), "{name}");
        }
    }

    #[test]
    fn what_the_table_does_not_mean_it_does_not_know() {
        for name in [
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "Quadro RTX 6000 with Max-Q Design",
            "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            "NVIDIA GeForce GTX 1650",
            "AMD Instinct MI300X",
            "",
        ] {
            assert_eq!(peak(name, Kind::Half, false), None, "{name}");
        }
        assert_eq!(peak("Tesla T4", Kind::BFloat16, false), None);
        assert_eq!(peak("NVIDIA H200", Kind::Int8, false), None);
    }

    #[test]
    fn products_of_fp32_are_faster_in_tf32_where_there_is_one() {
        assert_eq!(
            peak("NVIDIA A100-SXM4-80GB", Kind::Float, false),
            Some(19.5e12)
        );
        assert_eq!(
            peak("NVIDIA A100-SXM4-80GB", Kind::Float, true),
            Some(156e12)
        );
        assert_eq!(
            peak("Tesla V100-SXM2-16GB", Kind::Float, true),
            Some(15.7e12)
        );
    }

    #[test]
    fn no_row_is_slower_in_less_precision() {
        for row in ROWS {
            assert!(
                row.half >= row.tf32 && row.half >= row.fp32,
                "{:?}",
                row.words
            );
            assert!(row.tf32 == 0.0 || row.tf32 >= row.fp32, "{:?}", row.words);
            assert!(
                row.words
                    .iter()
                    .all(|word| *word == word.to_ascii_lowercase())
            );
        }
    }
}
