//! Random numbers that follow a seed, for tests that must be able to run the same again.

/// A source of random numbers.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// A source that follows `SEED` if the environment has it, else `seed`; it says which.
    ///
    /// # Panics
    /// When `SEED` is no number.
    #[expect(
        clippy::print_stdout,
        reason = "whoever looks into a failed test needs the seed"
    )]
    pub fn new(seed: u64) -> Self {
        let chosen = std::env::var("SEED").ok();
        let seed = chosen.map_or(seed, |text| text.parse().expect("SEED is a number"));
        println!("SEED={seed}");
        Self(seed)
    }

    /// The next number below `end`, which is not 0. (SplitMix64, public domain.)
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    /// One of some things.
    ///
    /// # Panics
    /// When there is none.
    pub fn pick<T: Copy>(&mut self, things: &[T]) -> T {
        things[self.below(things.len() as u64) as usize]
    }
}
