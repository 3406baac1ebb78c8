//! Random numbers that follow a seed, for tests that must be able to run the same again.

use bafs_sim::seeded_rng;

/// A source of random numbers.
#[derive(Debug, Clone)]
pub struct SeededRng(seeded_rng::SeededRng);

impl SeededRng {
    /// A source seeded by the variable `SEED`, else by `seed`; prints its seed.
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
        Self(seeded_rng::SeededRng::new(seed))
    }

    /// The next number below `end`, which is not 0.
    pub fn next_below(&mut self, end: u64) -> u64 {
        self.0.next_below(end)
    }

    /// One of some things.
    ///
    /// # Panics
    /// When there is none.
    pub fn choose<T: Copy>(&mut self, things: &[T]) -> T {
        things[self.next_below(things.len() as u64) as usize]
    }
}
