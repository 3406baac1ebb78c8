//! A workflow of forty pipelines while nodes, home, catalog and scheduler fail, several at once.

use std::time::Duration;

use bafs_tests::{chaos, mount_obstacle, report_skip};

fn check_survival(test: &str, seed: u64, faults: Duration) {
    if let Some(reason) = mount_obstacle() {
        return report_skip(test, &reason);
    }
    let ended = chaos::run_chaos(seed, faults).expect("the cluster runs");
    if let Some(why) = &ended.isolation_obstacle {
        report_skip(&format!("{test}: links and disks do not fail"), why);
    }
    assert!(!ended.faults.is_empty(), "nothing failed: {ended:?}");
    let is_fine = ended.is_complete && ended.is_identical && ended.leftovers.is_empty();
    assert!(is_fine, "seed {seed}: {ended:?}");
}

#[test]
fn cluster_survives_chaos() {
    check_survival("cluster_survives_chaos", 1, Duration::from_secs(15));
}

#[test]
#[ignore = "minutes; for soak"]
fn cluster_survives_long_chaos() {
    for seed in 2..12 {
        let test = "cluster_survives_long_chaos";
        check_survival(test, seed, Duration::from_secs(60));
    }
}
