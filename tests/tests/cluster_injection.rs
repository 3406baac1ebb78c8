//! Two users' runs while servers, links and disks fail as a seed says: all results are right,
//! nothing is left, and no job runs again but for a fault of what held it.

use bafs_tests::fault_injection::{self, SeedResult};
use bafs_tests::report_skip;

fn check_seed(test: &str, seed: u64) {
    if let Some(reason) = fault_injection::injection_obstacle() {
        return report_skip(test, &reason);
    }
    let verdict = fault_injection::run_seed(seed).expect("the cluster runs");
    check_result(&verdict);
}

fn check_result(verdict: &SeedResult) {
    assert!(!verdict.faults.is_empty(), "nothing failed: {verdict:#?}");
    let without: Vec<_> = verdict.reruns_without_cause().collect();
    assert!(
        verdict.has_passed(),
        "faults {:?}\nwrong {:#?}\nfailed {:#?}\nagain without cause {without:#?}\nkept {:?}",
        verdict.faults,
        verdict.wrong_files,
        verdict.problems,
        verdict.evidence_path
    );
}

#[test]
fn cluster_withstands_injected_faults() {
    check_seed("cluster_withstands_injected_faults", 2);
}

#[test]
fn cluster_withstands_other_injected_faults() {
    check_seed("cluster_withstands_other_injected_faults", 3);
}

#[test]
fn cluster_withstands_further_injected_faults() {
    check_seed("cluster_withstands_further_injected_faults", 4);
}

#[test]
#[ignore = "half an hour; for soak"]
fn cluster_withstands_forty_seeds_of_faults() {
    let test = "cluster_withstands_forty_seeds_of_faults";
    if let Some(reason) = fault_injection::injection_obstacle() {
        return report_skip(test, &reason);
    }
    let verdicts = fault_injection::run_seeds(1..=40, &|verdict| eprintln!("{verdict:?}"));
    for verdict in &verdicts {
        check_result(verdict);
    }
}
