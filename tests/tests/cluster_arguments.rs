//! Jobs with many words, on real processes: what Linux takes runs, what is longer is
//! refused, or fails as the job's own failure.

use std::process::Command;

use anyhow::{Result, ensure};
use bafs_tests::{TestCluster, bafs_program, mount_obstacle, printed_text, report_skip};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// A job that counts its own words, each of `bytes` bytes, and as many bytes of environment as one
/// word.
fn counting_workflow(words: usize, bytes: usize) -> String {
    let word = "y".repeat(bytes);
    let all = vec![word.as_str(); words].join(" ");
    format!(
        "volume v scratch 1 MB files 10\n\
         job a {{\n\
           executable = /bin/sh\n\
           arguments = -c 'echo $# ${{#WORD}} > /v/count' x {all}\n\
           environment = WORD={word}\n\
         }}\n\
         mount v a /v\n\
         extract v count bafs://home/count\n"
    )
}

fn start_cluster(name: &str) -> Result<Option<TestCluster>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    let world = TestCluster::start(&["30MB"])?;
    world.wait_for_servers(2)?;
    Ok(Some(world))
}

#[test]
fn cluster_runs_jobs_with_the_most_arguments() -> Result<()> {
    let name = "cluster_runs_jobs_with_the_most_arguments";
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    let path = world.write_workflow(&counting_workflow(1_900, 1_000))?;
    let output = world
        .bafs_command(&["run", &path.to_string_lossy()])
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    let counted = String::from_utf8(world.read_home("count")?)?;
    ensure!(counted == "1900 1000\n", "the job had {counted} words");
    Ok(())
}

/// The nodes inherit a stack of this process, a quarter of which is for words.
const STACK_BYTES: u64 = 8 << 20;

#[test]
fn cluster_fails_jobs_with_too_many_arguments() -> Result<()> {
    let name = "cluster_fails_jobs_with_too_many_arguments";
    let (_, hard) = getrlimit(Resource::RLIMIT_STACK)?;
    setrlimit(Resource::RLIMIT_STACK, STACK_BYTES.min(hard), hard)?;
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    let path = world.write_workflow(&counting_workflow(3_000, 1_000))?;
    let output = world
        .bafs_command(&["run", &path.to_string_lossy()])
        .output()?;
    let text = printed_text(&output);
    ensure!(output.status.code() == Some(1), text);
    ensure!(text.contains("Linux commonly takes 2097152"), text);
    ensure!(text.contains("cannot start"), text);
    ensure!(text.contains("Linux takes 128 KiB for each"), text);
    ensure!(text.contains("put them into a file"), text);
    ensure!(!text.contains("environment failed"), text);
    Ok(())
}

/// One word that is longer than Linux takes, and words that no message carries.
#[test]
fn check_refuses_arguments_beyond_every_node() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("test.bafs");
    for (words, bytes, says) in [
        (1, 140_000, "Linux takes at most 131071"),
        (5_000, 1_000, "a job may have 4194304"),
    ] {
        std::fs::write(&path, counting_workflow(words, bytes))?;
        let output = Command::new(bafs_program())
            .arg("check")
            .arg(&path)
            .output()?;
        let text = printed_text(&output);
        ensure!(output.status.code() == Some(1), text);
        ensure!(text.contains(says) && text.contains("job 'a'"), text);
        ensure!(text.contains("put them into a file"), text);
        ensure!(
            text.len() < 2_000,
            "the words are not shown: {}",
            text.len()
        );
    }
    Ok(())
}
