//! Wrong use and lacking machines: the user is told what failed, why and what to do, at once.
#![expect(
    clippy::disallowed_methods,
    reason = "the promises are about real seconds"
)]

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bafs_tests::{World, program, said, skip};

/// Longest time until the user is told; the scheduler's own patience would be 45 seconds.
const AT_ONCE: Duration = Duration::from_secs(5);

const WORKFLOW: &str = "volume v scratch 1 MB\njob j {\nexecutable = /bin/true\n}\nmount v j /v\n";

#[test]
fn demo_and_run_say_at_once_what_the_machine_lacks() -> Result<()> {
    let name = "demo_and_run_say_at_once_what_the_machine_lacks";
    let is_root = nix::unistd::geteuid().is_root();
    let device = std::fs::metadata("/dev/fuse").map(|found| found.permissions().mode() & 0o7);
    if !is_root || device.is_ok_and(|others| others == 6) {
        skip(
            name,
            "it needs root, and a /dev/fuse that is closed to others",
        );
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o777))?;
    let copy = directory.path().join("bafs");
    std::fs::copy(program(), &copy)?;
    let workflow = directory.path().join("test.bafs");
    std::fs::write(&workflow, WORKFLOW)?;
    let workflow = workflow.to_string_lossy().into_owned();
    for args in [
        &["demo", "--small"][..],
        &["run", "--local", "2", &workflow],
    ] {
        let started = Instant::now();
        let output = Command::new("setpriv")
            .args(["--reuid=12345", "--regid=12345", "--clear-groups"])
            .arg(&copy)
            .args(args)
            .env("TMPDIR", directory.path())
            .output()?;
        let text = said(&output);
        ensure!(output.status.code() == Some(1), text);
        ensure!(
            started.elapsed() < AT_ONCE,
            "{:?}: {text}",
            started.elapsed()
        );
        ensure!(text.contains("/dev/fuse") && text.contains("to do:"), text);
    }
    Ok(())
}

#[test]
fn an_error_in_a_job_description_file_shows_that_files_line() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let workflow = directory.path().join("test.bafs");
    std::fs::write(&workflow, "job j one.submit\n")?;
    let job = "executable = /bin/true\nenvironment = A=1;B=two words\n";
    std::fs::write(directory.path().join("one.submit"), job)?;
    let output = Command::new(program())
        .arg("check")
        .arg(&workflow)
        .output()?;
    let text = said(&output);
    ensure!(output.status.code() == Some(1), text);
    ensure!(text.contains("one.submit:2:"), text);
    ensure!(text.contains("2 | environment = A=1;B=two words"), text);
    Ok(())
}

#[test]
fn cluster_refuses_a_foreign_identity_at_once() -> Result<()> {
    let world = World::start(&["20MB"])?;
    let stranger = tempfile::tempdir()?;
    let identity = stranger.path().join("cluster");
    let made = Command::new(program())
        .arg("init")
        .arg(&identity)
        .output()?;
    ensure!(made.status.success(), said(&made));
    let workflow = world.workflow("job j {\nexecutable = /bin/true\n}\n")?;
    let workflow = workflow.to_string_lossy();
    for args in [&["servers"][..], &["run", &workflow]] {
        let mut command = world.bafs(args);
        let output = command.env("BAFS_IDENTITY", &identity).output()?;
        let text = said(&output);
        ensure!(output.status.code() == Some(1), "{args:?}: {text}");
        ensure!(text.contains("PeerRefused"), "{args:?}: {text}");
    }
    Ok(())
}
