//! The queue of `bafs scheduler` where workflows meet: results at one place, and a full disk.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::small_disk::{fill_disk, path_in_namespace};
use bafs_tests::{mount_obstacle, report_skip};

use crate::cluster_service::{TestService, start_service, write_workflow};

/// The corrected workflow ends last, however short it is, and so its result stays.
#[test]
fn later_submission_waits_for_the_same_results() -> Result<()> {
    let test = "cluster_service_queue::later_submission_waits_for_the_same_results";
    let Some(service) = start_service(test, &["100MB", "100MB"], &[])? else {
        return Ok(());
    };
    let alice = service.add_user("alice", &[])?;
    let bob = service.add_user("bob", &["--space=50MB"])?;
    let write = |text: &str, seconds: u32| -> Result<_> {
        let text = format!(
            "volume out scratch 1 MB\njob a {{\nexecutable = /bin/sh\narguments = -c \"sleep \
             {seconds}; echo {text} > /out/x\"\n}}\nmount out a /out\n\
             extract out x bafs://home/result\n"
        );
        let path = service.world.home.path().join("same.bafs");
        std::fs::write(&path, text)?;
        Ok(path)
    };
    let first = service.submit(&alice, &write("old", 12)?)?;
    service.wait_for_state(&alice, first, "running")?;
    let second = service.submit(&alice, &write("new", 0)?)?;
    let third = service.submit(&bob, &write("last", 0)?)?;
    let other = service.submit(&bob, &write_workflow(&service, "other", 1, "0")?)?;
    service.wait_for_state(&bob, other, "complete")?;
    let rows = service.json(&alice, &["queue"])?;
    let reason = rows[1]["details"]["reason"].as_str().unwrap_or_default();
    let told = format!("when workflow {first} has ended, whose results go to the same places");
    ensure!(reason.contains(&told), "{rows}");
    let rows = service.json(&bob, &["queue"])?;
    let reason = rows[0]["details"]["reason"].as_str().unwrap_or_default();
    ensure!(reason.contains("a workflow of another user"), "{rows}");
    assert_eq!(service.states(&alice)?[0], (first, "running".to_owned()));
    service.wait_for_state(&alice, second, "complete")?;
    assert_eq!(service.states(&alice)?[0], (first, "complete".to_owned()));
    service.wait_for_state(&bob, third, "complete")?;
    assert_eq!(service.world.read_home("result")?, b"last\n");
    Ok(())
}

/// What it was told before is kept, and it goes on when there is room.
#[test]
fn service_survives_a_full_disk() -> Result<()> {
    let test = "cluster_service_queue::service_survives_a_full_disk";
    let is_root = nix::unistd::geteuid().is_root();
    let obstacle = mount_obstacle().or_else(|| (!is_root).then(|| "it needs root".to_owned()));
    if let Some(reason) = obstacle {
        report_skip(test, &reason);
        return Ok(());
    }
    let disk = Some("-t tmpfs -o size=8m tmpfs");
    let mut service = TestService::start_on_disk(&["200MB"], &["--runs=1"], disk)?;
    let admin = service.world.cluster.identity();
    let address = service.address.clone();
    let at = ["--service", &address];
    let with_service = |words: &[&str]| service.code(&admin, &[words, &at].concat());
    let path = write_workflow(&service, "w", 2, "1")?;
    let path = path.to_string_lossy();
    for _ in 0..2 {
        ensure!(with_service(&["submit", &path])? == Some(0));
    }
    let process = service.process.as_ref().context("it runs")?;
    let fill = format!("{}/fill", service.state.path().display());
    let fill = path_in_namespace(process, &fill);
    fill_disk(&fill)?;
    assert_eq!(with_service(&["submit", &path])?, Some(6), "no room");
    // The last page of the journal takes some more.
    let mut code = Some(0);
    for _ in 0..60 {
        for word in ["hold", "release"] {
            if code == Some(0) {
                code = with_service(&[word, "1"])?;
            }
        }
    }
    assert_eq!(code, Some(6), "no room");
    std::thread::sleep(Duration::from_secs(5));
    let list = |words: &[&str]| service.json(&admin, &[words, &at].concat());
    let rows = list(&["queue"])?;
    let count = rows.as_array().map(Vec::len);
    ensure!(count == Some(2), "both are there: {rows}");
    std::fs::remove_file(&fill)?;
    ensure!(with_service(&["release", "1"])?.is_some());
    let ended = |rows: &serde_json::Value| {
        let rows = rows.as_array().into_iter().flatten();
        rows.filter(|row| row["state"] == "complete").count()
    };
    let mut rows = serde_json::Value::Null;
    for _ in 0..300 {
        rows = list(&["queue", "--all"])?;
        if ended(&rows) == 2 {
            break;
        }
        std::thread::sleep(Duration::from_millis(300));
    }
    ensure!(ended(&rows) == 2, "{rows}");
    assert_eq!(service.world.read_home("w/2")?, b"2\n");
    service.end_process(nix::sys::signal::Signal::SIGKILL)?;
    Ok(())
}

/// A process that cannot be started, as on a full disk, fails no workflow: its user is told why it
/// waits.
#[test]
fn workflow_waits_while_it_cannot_be_started() -> Result<()> {
    let test = "cluster_service_queue::workflow_waits_while_it_cannot_be_started";
    let Some(service) = start_service(test, &["200MB"], &[])? else {
        return Ok(());
    };
    let alice = service.add_user("alice", &["--home", "alice"])?;
    let users = service.state.path().join("state/users");
    std::fs::remove_dir_all(&users)?;
    std::fs::write(&users, "")?;
    let path = write_workflow(&service, "alice", 1, "0")?;
    let id = service.submit(&alice, &path)?;
    // Five attempts took eight seconds.
    std::thread::sleep(Duration::from_secs(10));
    let rows = service.json(&alice, &["queue"])?;
    ensure!(rows[0]["state"] == "running", "{rows}");
    let reason = rows[0]["details"]["reason"].as_str().unwrap_or_default();
    ensure!(reason.contains("cannot be started"), "{rows}");
    std::fs::remove_file(&users)?;
    service.wait_for_state(&alice, id, "complete")?;
    // One that cannot be changed keeps no other from it.
    let next = service.submit(&alice, &write_workflow(&service, "alice", 1, "60")?)?;
    let removed = service.code(&alice, &["remove", "17", &next.to_string()])?;
    ensure!(removed == Some(4), "{removed:?}");
    service.wait_for_state(&alice, next, "removed")
}
