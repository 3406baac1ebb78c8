//! Seeded numbers for simulations: equal seeds give equal numbers on every machine. Not for ids
//! or keys.

/// Numbers that look random and are the same on every machine (SplitMix64, Steele et al. 2014).
#[derive(Debug, Clone)]
pub struct SeededRng(u64);

impl SeededRng {
    /// Dice that fall in the order of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `bound`, which is not zero.
    pub fn next_below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    /// True in `permille` of 1000 cases.
    pub fn next_bool(&mut self, permille: u64) -> bool {
        self.next_below(1000) < permille
    }
}
