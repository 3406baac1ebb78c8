//! Suites of others on real mounts: pjdfstest (what each call must do) and fsx (what is written is
//! read). Figures are printed; nothing here knows what a case tests.
#![allow(clippy::print_stdout, reason = "figures are what a suite is run for")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use bafs_tests::mounted_volume::{DataPath, MountedVolume};
use bafs_tests::seeded_rng::SeededRng;
use bafs_tests::{find_tool, mount_obstacle, printed_text, report_skip, uring};

/// Cases of pjdfstest that do not apply, with the reason. Those named `erofs` run on their own.
const EXCLUDED_CASES: [(&str, &str); 1] = [(
    "link::link_count_max",
    "pathconf(2) of the C library knows no LINK_MAX for FUSE, so the case has no number to test",
)];

/// Least cases that must have passed: a suite that ran nothing has shown nothing.
const CASES_PASSED_MIN: u64 = 380;
const READ_ONLY_CASES_PASSED_MIN: u64 = 13;

/// Two users and groups of every Debian system. What may differ between file systems is asked for.
const PJDFSTEST_CONFIGURATION: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.02
allow_remount = REMOUNT
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

/// `mount -o remount` gives the work to the type's helper, which would look for a program of the
/// volume's name; the kernel can do it alone.
const REMOUNT_HELPER: &str = "#!/bin/sh\nexec mount -i -n \"$3\" \"$4\" \"$2\"\n";

const FSX_CONFIGURATION: &str = "flen = 262144\n[weights]\nclose_open = 0.2\ninvalidate = 1.0\n\
    mapread = 1.0\nmapwrite = 1.0\nread = 1.0\nwrite = 1.0\ntruncate = 0.3\nfsync = 0.05\n\
    fdatasync = 0.05\nposix_fallocate = 0.2\npunch_hole = 0.3\nsendfile = 0.3\n\
    posix_fadvise = 0.2\ncopy_file_range = 0.5\n";

fn find_suite(test: &str, tool_name: &str) -> Option<PathBuf> {
    let reason = mount_obstacle().or_else(|| {
        let is_root = nix::unistd::geteuid().is_root();
        (!is_root).then(|| "only root may act as other users".to_owned())
    });
    let found = find_tool(tool_name);
    let missing = || format!("{tool_name} is missing: `cargo xtask test` installs it");
    match reason.or_else(|| found.is_none().then(missing)) {
        Some(reason) => {
            report_skip(test, &reason);
            None
        }
        None => found,
    }
}

#[test]
fn mount_passes_pjdfstest() -> Result<()> {
    let Some(pjdfstest) = find_suite("mount_passes_pjdfstest", "pjdfstest") else {
        return Ok(());
    };
    check_pjdfstest(&pjdfstest, &DataPath::ALL)
}

#[test]
fn mount_with_write_back_passes_pjdfstest() -> Result<()> {
    let name = "mount_with_write_back_passes_pjdfstest";
    match find_suite(name, "pjdfstest") {
        Some(pjdfstest) => check_pjdfstest(&pjdfstest, &DataPath::WRITE_BACK),
        None => Ok(()),
    }
}

#[test]
fn mount_by_ring_passes_pjdfstest() -> Result<()> {
    let name = "mount_by_ring_passes_pjdfstest";
    match find_suite(name, "pjdfstest") {
        Some(pjdfstest) if uring::can_use_rings(name) => {
            check_pjdfstest(&pjdfstest, &[DataPath::Ring])
        }
        _ => Ok(()),
    }
}

fn check_pjdfstest(pjdfstest: &Path, ways: &[DataPath]) -> Result<()> {
    for &way in ways {
        let stand = MountedVolume::start(way)?;
        let (own, other) = (stand.create_directory("pjdfstest")?, tempfile::tempdir()?);
        let all = PjdfstestTotals::parse(&run_pjdfstest(pjdfstest, &own, other.path(), false)?)?;
        let read_only =
            PjdfstestTotals::parse(&run_pjdfstest(pjdfstest, &own, other.path(), true)?)?;
        let excluded: Vec<_> = all
            .skipped
            .iter()
            .filter(|name| !name.contains("::erofs"))
            .collect();
        println!(
            "pjdfstest {way:?}: {} passed, {} failed, {} excluded",
            all.passed + read_only.passed,
            all.failed.len() + read_only.failed.len(),
            excluded.len()
        );
        let failed = [all.failed, read_only.failed].concat();
        ensure!(failed.is_empty(), "{way:?}: failed: {failed:?}");
        ensure!(
            all.passed >= CASES_PASSED_MIN,
            "{way:?}: {} passed",
            all.passed
        );
        ensure!(
            read_only.passed >= READ_ONLY_CASES_PASSED_MIN && read_only.skipped.is_empty(),
            "{way:?}: {} passed on a read-only mount",
            read_only.passed
        );
        let unknown = excluded
            .iter()
            .find(|name| !EXCLUDED_CASES.iter().any(|(known, _)| known == **name));
        ensure!(unknown.is_none(), "{way:?}: did not run: {unknown:?}");
    }
    Ok(())
}

/// Runs everything, or the cases that mount the volume read-only for a while. These run alone:
/// after other cases the crate itself holds files open for writing, on every file system.
fn run_pjdfstest(program: &Path, own: &Path, other: &Path, remount: bool) -> Result<Output> {
    let place = tempfile::tempdir()?;
    let (configuration, helper) = (place.path().join("c.toml"), place.path().join("helper"));
    fs::write(
        &configuration,
        PJDFSTEST_CONFIGURATION.replace("REMOUNT", &remount.to_string()),
    )?;
    let script = if remount {
        fs::write(&helper, REMOUNT_HELPER)?;
        // In a mount name space of its own, so that the system's helper stays as it is outside.
        "chmod 755 $0; h=$(readlink -f /sbin/mount.fuse) && mount --bind $0 $h; exec \"$@\" erofs"
    } else {
        "exec \"$@\""
    };
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-ec", script])
        .arg(&helper)
        .arg(program)
        .arg("-c")
        .arg(&configuration)
        .arg("-p")
        .arg(own)
        .arg("-s")
        .arg(other)
        .output()?;
    Ok(output)
}

/// What pjdfstest says at its end, and the cases that did not pass.
struct PjdfstestTotals {
    passed: u64,
    failed: Vec<String>,
    skipped: Vec<String>,
}

impl PjdfstestTotals {
    fn parse(output: &Output) -> Result<Self> {
        let text = String::from_utf8_lossy(&output.stdout);
        let ending = |word: &str| {
            text.lines()
                .filter(|line| line.ends_with(word) && line.contains("::"))
                .filter_map(|line| line.split_whitespace().next())
                .map(str::to_owned)
                .collect()
        };
        let summary = text.lines().find(|line| line.starts_with("Summary:"));
        let passed = summary
            .and_then(|line| line.split(", ").find_map(|it| it.strip_suffix(" passed")))
            .and_then(|count| count.trim().parse().ok());
        Ok(Self {
            passed: passed.with_context(|| printed_text(output))?,
            failed: ending(" FAILED"),
            skipped: ending(" skipped"),
        })
    }
}

#[test]
fn mount_survives_fsx() -> Result<()> {
    check_fsx("mount_survives_fsx", &DataPath::ALL, 1, 2_000)
}

#[test]
fn mount_by_ring_survives_fsx() -> Result<()> {
    let name = "mount_by_ring_survives_fsx";
    match uring::can_use_rings(name) {
        true => check_fsx(name, &[DataPath::Ring], 1, 5_000),
        false => Ok(()),
    }
}

#[test]
fn mount_with_write_back_survives_fsx() -> Result<()> {
    let name = "mount_with_write_back_survives_fsx";
    check_fsx(name, &DataPath::WRITE_BACK, 1, 1_500)?;
    match uring::can_use_rings(name) {
        true => check_fsx(name, &[DataPath::WriteBackRing], 1, 1_500),
        false => Ok(()),
    }
}

#[test]
#[ignore = "long: `cargo xtask soak` runs it"]
fn mount_survives_a_million_operations_of_fsx() -> Result<()> {
    let name = "mount_survives_a_million_operations_of_fsx";
    check_fsx(
        name,
        &[DataPath::Inline, DataPath::AgentProcess],
        4,
        250_000,
    )?;
    check_fsx(name, &DataPath::WRITE_BACK, 1, 100_000)?;
    check_fsx(name, &[DataPath::Uncached], 1, 100_000)
}

fn check_fsx(test: &str, ways: &[DataPath], runs: u64, operations: u64) -> Result<()> {
    let Some(fsx) = find_suite(test, "fsx") else {
        return Ok(());
    };
    let mut rng = SeededRng::new(1);
    for &way in ways {
        let (stand, place) = (MountedVolume::start(way)?, tempfile::tempdir()?);
        let configuration = place.path().join("fsx.toml");
        fs::write(&configuration, FSX_CONFIGURATION)?;
        for _ in 0..runs {
            let seed = rng.next_below(1 << 32).to_string();
            let output = Command::new(&fsx)
                .arg("-f")
                .arg(&configuration)
                .args(["-N", &operations.to_string(), "-S", &seed, "-P"])
                .arg(place.path())
                .arg(stand.path().join(format!("fsx{seed}")))
                .output()?;
            ensure!(
                output.status.success(),
                "{way:?}, fsx -S {seed}: {}",
                printed_text(&output)
            );
        }
        println!("fsx {way:?}: {} operations", runs * operations);
    }
    Ok(())
}
