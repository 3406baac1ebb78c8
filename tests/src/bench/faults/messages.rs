//! Faults of messages: wrong messages, and lost logs.

use anyhow::{Result, ensure};

use super::runs::{check_failure_beside_watched_volume, check_no_advice, run_checked};
use super::user_directory::{UserDirectory, last_lines};
use crate::TestCluster;

/// The log of a failed job is printed and sent home, though its workflow names a file for it.
pub(super) fn check_log_of_failed_job() -> Result<()> {
    let directory = UserDirectory::new()?;
    let text = "volume w scratch 10 MB\njob a {\nexecutable = sh\n\
        arguments = -c 'seq 300; echo no column barcode in the sample sheet >&2; exit 4'\n\
        output = /w/log.out\nerror = /w/log.err\n}\nmount w a /w\n\
        extract w log.err bafs://home/logs/a.err\n";
    let ended = directory.run_workflow(text, &["--local", "1"])?;
    ended.check_code(1)?;
    let why = "no column barcode";
    ensure!(
        ended.has_text(why),
        "it says: {}",
        last_lines(&ended.output)
    );
    let log = directory.read_file("logs/a.err");
    ensure!(log.contains(why), "the log at home has '{log}'");
    Ok(())
}

/// A watched volume, whose calls are invisible, is never reported as unused. A grant does not
/// outlast its parent. A failure of a job's own makes no producer run again.
pub(super) fn check_message_accuracy() -> Result<()> {
    let watched = "volume w scratch 16 MB watched\njob a {\nexecutable = sh\n\
        arguments = -c 'head -c 2000000 /dev/zero > /w/x; echo 1 > /w/o'\n}\nmount w a /w\n\
        extract w o bafs://home/o\n";
    check_no_advice(watched, "o", "1")?;
    check_failure_beside_watched_volume()?;
    // The identities of this cluster are good for a week.
    let world = TestCluster::start(&["100MB"])?;
    world.wait_for_servers(2)?;
    run_checked(
        &world,
        &["volume", "create", "v", "--node", "n1", "--size", "5MB"],
    )?;
    let directory = tempfile::tempdir()?;
    let granted = directory.path().join("granted");
    let days = [
        "grant",
        "v",
        "--days",
        "30",
        "--to",
        &granted.to_string_lossy(),
    ];
    let output = world.bafs_command(&days).output()?;
    let told = crate::printed_text(&output);
    ensure!(!told.contains("30 days"), "{}", last_lines(&told));
    Ok(())
}
