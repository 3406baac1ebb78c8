//! What steps write is enough to have the state again, without deciding anything once more.

use crate::seeds::{LIMIT_MS, cluster_for_seed};

const SEEDS: u64 = 40;

#[test]
fn state_is_restored_from_written_rows() {
    let seeds = std::env::var("SEEDS").map_or(SEEDS, |text| text.parse().expect("a number"));
    let first = std::env::var("SEED").map_or(0, |text| text.parse().expect("a number"));
    let mut differences = Vec::new();
    for seed in first..seeds {
        let mut world = cluster_for_seed(seed);
        world.check_recording();
        world.run_to_end(LIMIT_MS);
        let found = world.restored_differences.into_iter().take(5);
        differences.extend(found.map(|text| format!("SEED={seed} {text}")));
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
