//! Products of 4-bit codes in words: equal on all instruction sets, and within the words for eight vectors.

use overdrive_kernels::{BYTES, InstructionSet, Kernel, Simd, WORDS};

/// Sums the products of some vectors of codes and bytes.
struct Pairs<'a>(&'a [([i8; BYTES], [i8; BYTES])]);

impl Kernel for Pairs<'_> {
    type Output = [i16; WORDS];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [i16; WORDS] {
        let mut sums = s.splat_pair(&[0, 0]);
        for (codes, bytes) in self.0 {
            sums = s.dot_pairs(sums, s.load_bytes(codes), s.load_bytes(bytes));
        }
        let mut out = [0; WORDS];
        s.store_words(sums, &mut out);
        out
    }
}

#[test]
fn eight_vectors_of_products_fit_words_on_every_set() {
    let mixed = |vector: usize| {
        let codes = std::array::from_fn(|at| ((at * 7 + vector * 3) % 16) as i8);
        let bytes = std::array::from_fn(|at| ((at * 31 + vector * 57) % 255) as i8);
        (codes, bytes.map(|byte: i8| byte.max(-127)))
    };
    let cases = [
        vec![([15; BYTES], [127; BYTES]); 8],
        vec![([15; BYTES], [-127; BYTES]); 8],
        (0..8).map(mixed).collect(),
    ];
    for case in &cases {
        let expected: [i32; WORDS] = std::array::from_fn(|word| {
            let products = case.iter().flat_map(|(codes, bytes)| {
                [2 * word, 2 * word + 1].map(|at| i32::from(codes[at]) * i32::from(bytes[at]))
            });
            products.sum()
        });
        for set in InstructionSet::available() {
            assert_eq!(set.run(Pairs(case)).map(i32::from), expected, "{set:?}");
        }
    }
}
