//! `bafs volume put`, `get` and `ls`: whole trees, several writers, full volumes, killed nodes.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};

use crate::cluster_volume_commands::failure_of;

fn start_cluster(nodes: &[&str]) -> Result<TestCluster> {
    let world = TestCluster::start(nodes)?;
    world.wait_for_servers(nodes.len() + 1)?;
    Ok(world)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path of text")
}

/// A tree with what trees have: an empty directory, a closed one, a link, an odd name, a program.
fn write_tree(top: &Path) -> Result<()> {
    fs::create_dir_all(top.join("deep/empty"))?;
    fs::write(top.join("deep/large"), vec![42; 9 << 20])?;
    fs::write(top.join("deep/none"), b"")?;
    fs::write(top.join("new\nline"), b"odd")?;
    fs::write(top.join(OsStr::from_bytes(b"\xff")), b"no text")?;
    fs::write(top.join("run"), b"#!/bin/sh\n")?;
    fs::set_permissions(top.join("run"), PermissionsExt::from_mode(0o755))?;
    symlink("deep/large", top.join("link"))?;
    fs::create_dir(top.join("closed"))?;
    fs::write(top.join("closed/f"), b"f")?;
    fs::set_permissions(top.join("closed"), PermissionsExt::from_mode(0o555))?;
    Ok(())
}

fn check_tree(top: &Path) -> Result<()> {
    ensure!(fs::read(top.join("deep/large"))? == vec![42; 9 << 20]);
    ensure!(fs::read(top.join("deep/none"))?.is_empty());
    ensure!(fs::read(top.join("new\nline"))? == b"odd");
    ensure!(fs::read(top.join(OsStr::from_bytes(b"\xff")))? == b"no text");
    ensure!(fs::read_dir(top.join("deep/empty"))?.next().is_none());
    ensure!(fs::read_link(top.join("link"))? == Path::new("deep/large"));
    let mode = |name: &str| fs::metadata(top.join(name)).map(|it| it.permissions().mode() & 0o777);
    ensure!(mode("run")? == 0o755 && mode("closed")? == 0o555);
    Ok(())
}

#[test]
fn cluster_put_and_get_preserve_trees() -> Result<()> {
    let world = start_cluster(&["40MB"])?;
    let directory = tempfile::tempdir()?;
    let tree = directory.path().join("tree");
    write_tree(&tree)?;
    world.run_json(&["volume", "create", "w", "--node", "n1", "--size", "20MB"])?;
    let put = world.run_json(&["volume", "put", "w", text(&tree)?, "in/here"])?;
    ensure!(put["files"] == 6 && put["path"] == "in/here", "{put}");
    let listed = world.run_json(&["volume", "ls", "w", "in/here/deep"])?;
    let listed = listed.as_array().context("a list")?;
    let paths: Vec<_> = listed.iter().filter_map(|it| it["path"].as_str()).collect();
    let below = ["", "/empty", "/large", "/none"].map(|it| format!("in/here/deep{it}"));
    ensure!(paths == below, "{paths:?}");
    let large = listed.iter().find(|it| it["kind"] == "file");
    ensure!(large.is_some_and(|it| it["bytes"] == 9 << 20), "{listed:?}");
    let back = directory.path().join("back");
    world.run_json(&["volume", "get", "w", "in/here", text(&back)?])?;
    check_tree(&back)?;
    // A directory is not replaced, a file is.
    let again = ["volume", "put", "w", text(&tree)?, "in/here", "--json"];
    ensure!(failure_of(&world.bafs_command(&again).output()?)?.0 == "exists");
    let mut stdin = world.bafs_command(&["volume", "put", "w", "-", "in/here/run"]);
    let mut stdin = stdin.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    stdin
        .stdin
        .take()
        .context("it is piped")?
        .write_all(b"new")?;
    ensure!(stdin.wait()?.success());
    let got = world
        .bafs_command(&["volume", "get", "w", "in/here/run", "-"])
        .output()?;
    ensure!(got.stdout == b"new", "{}", printed_text(&got));
    let all = world.run_json(&["volume", "ls", "w"])?;
    ensure!(
        !all.to_string().contains(".bafs-put"),
        "a draft is left: {all}"
    );
    // All of it, out of a cache too.
    let home = world.home.path().join("in");
    write_tree(&home)?;
    let cache = ["volume", "create", "c", "--node", "n1", "--size", "15MB"];
    world.run_json(&[&cache[..], &["--cache", "bafs://home/in"]].concat())?;
    let cached = directory.path().join("cached");
    world.run_json(&["volume", "get", "c", "/", text(&cached)?])?;
    check_tree(&cached)?;
    for closed in [&tree, &back, &home, &cached] {
        fs::set_permissions(closed.join("closed"), PermissionsExt::from_mode(0o755))?;
    }
    Ok(())
}

#[test]
fn cluster_directories_are_extracted_as_sets() -> Result<()> {
    let world = start_cluster(&["40MB"])?;
    let directory = tempfile::tempdir()?;
    fs::create_dir(directory.path().join("out"))?;
    fs::write(directory.path().join("out/a"), b"a")?;
    world.run_json(&["volume", "create", "w", "--node", "n1", "--size", "20MB"])?;
    world.run_json(&["volume", "put", "w", text(&directory.path().join("out"))?])?;
    world.run_json(&["volume", "extract", "w", "out/", "bafs://home/set/"])?;
    ensure!(world.read_home("set/a")? == b"a");
    let manifest: serde_json::Value =
        serde_json::from_slice(&world.read_home("set/bafs-manifest.json")?)?;
    ensure!(
        manifest["complete"] == true && manifest["files"][0]["path"] == "a",
        "{manifest}"
    );
    Ok(())
}

#[test]
fn cluster_concurrent_puts_are_all_whole() -> Result<()> {
    let world = start_cluster(&["60MB"])?;
    let directory = tempfile::tempdir()?;
    world.run_json(&["volume", "create", "w", "--node", "n1", "--size", "50MB"])?;
    let mut puts = Vec::new();
    for number in 0..4_u8 {
        let file = directory.path().join(number.to_string());
        fs::write(&file, vec![number; 5 << 20])?;
        let args = ["volume", "put", "w", text(&file)?, "--wait", "60", "--json"];
        let mut put = world.bafs_command(&args);
        puts.push(put.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?);
        // To the same place, too: one of them wins.
        let args = [
            "volume",
            "put",
            "w",
            text(&file)?,
            "same",
            "--wait",
            "60",
            "--json",
        ];
        let mut put = world.bafs_command(&args);
        puts.push(put.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?);
    }
    for put in puts {
        let output = put.wait_with_output()?;
        ensure!(output.status.success(), "{}", printed_text(&output));
    }
    for number in 0..4_u8 {
        let path = number.to_string();
        let got = world
            .bafs_command(&["volume", "get", "w", &path, "-"])
            .output()?;
        ensure!(
            got.stdout == vec![number; 5 << 20],
            "{number} is another file"
        );
    }
    let same = world
        .bafs_command(&["volume", "get", "w", "same", "-"])
        .output()?
        .stdout;
    ensure!(same.len() == 5 << 20 && same.iter().all(|byte| *byte == same[0]));
    Ok(())
}

#[test]
fn cluster_put_yields_to_a_job() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_put_yields_to_a_job", &reason);
        return Ok(());
    }
    let world = start_cluster(&["60MB"])?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("f");
    fs::write(&file, b"f")?;
    world.run_json(&["volume", "create", "w", "--node", "n1", "--size", "1MB"])?;
    let script = "echo 1 > /w/mine; echo ready; read line; echo 2 >> /w/mine";
    let exec = ["exec", "--mount", "w:/w", "--", "sh", "-ec", script];
    let mut job = world.bafs_command(&exec);
    let mut job = job.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut said = [0; 5];
    job.stdout
        .as_mut()
        .context("it is piped")?
        .read_exact(&mut said)?;
    let put = ["volume", "put", "w", text(&file)?, "--wait", "1", "--json"];
    let failure = failure_of(&world.bafs_command(&put).output()?)?;
    ensure!(failure == ("busy".to_owned(), 8), "{failure:?}");
    let resize = ["volume", "resize", "w", "--size", "2MB", "--json"];
    let resized = world.bafs_command(&resize).output()?;
    if !resized.status.success() {
        ensure!(
            failure_of(&resized)?.0 == "busy",
            "{}",
            printed_text(&resized)
        );
    }
    job.stdin
        .take()
        .context("it is piped")?
        .write_all(b"go\n")?;
    ensure!(job.wait()?.success(), "the job lost its volume");
    world.run_json(&["volume", "put", "w", text(&file)?])?;
    let got = world
        .bafs_command(&["volume", "get", "w", "mine", "-"])
        .output()?;
    ensure!(got.stdout == b"1\n2\n", "{}", printed_text(&got));
    Ok(())
}

#[test]
fn cluster_put_into_a_killed_node_is_unreachable() -> Result<()> {
    let mut world = start_cluster(&["60MB"])?;
    world.run_json(&["volume", "create", "w", "--node", "n1", "--size", "50MB"])?;
    for is_restarted in [false, true] {
        let put = ["volume", "put", "w", "-", "late", "--json"];
        let mut put = world.bafs_command(&put);
        put.stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut put = put.spawn()?;
        let mut stdin = put.stdin.take().context("it is piped")?;
        // More than what one call carries: the first call is over.
        stdin.write_all(&vec![1; 9 << 20])?;
        std::thread::sleep(Duration::from_millis(500));
        world.cluster.kill("n1")?;
        if is_restarted {
            world.cluster.restart("n1")?;
        }
        // It may have ended already.
        let _ = stdin.write_all(&vec![1; 9 << 20]);
        drop(stdin);
        let output = put.wait_with_output()?;
        let failure = failure_of(&output)?;
        ensure!(
            failure == ("unreachable".to_owned(), 75),
            "{}",
            printed_text(&output)
        );
        if !is_restarted {
            world.cluster.restart("n1")?;
        }
        let listed = world.run_json(&["volume", "ls", "w"])?;
        let listed = listed.as_array().context("a list")?;
        ensure!(
            listed.iter().all(|it| it["path"] != "late"),
            "half a file: {listed:?}"
        );
    }
    // What was left takes no space from the next one.
    let file = world.home.path().join("f");
    fs::write(&file, vec![2; 45 << 20])?;
    world.run_json(&["volume", "put", "w", text(&file)?])?;
    let shown = world.run_json(&["volume", "show", "w"])?;
    ensure!(shown["used_files"] == 1, "{shown}");
    Ok(())
}

#[test]
fn cluster_get_from_a_killed_node_is_unreachable() -> Result<()> {
    let mut world = start_cluster(&["60MB"])?;
    world.write_home("in/large", &vec![3; 40 << 20])?;
    let create = ["volume", "create", "w", "--node", "n1", "--size", "50MB"];
    world.run_json(&[&create[..], &["--from", "bafs://home/in"]].concat())?;
    let get = ["volume", "get", "w", "large", "-", "--json"];
    let mut get = world.bafs_command(&get);
    let mut get = get.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut first = [0; 1024];
    let mut stdout = get.stdout.take().context("it is piped")?;
    stdout.read_exact(&mut first)?;
    // It waits for its reader, after one or two calls.
    world.cluster.kill("n1")?;
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest)?;
    ensure!(
        get.wait()?.code() == Some(75) && rest.len() < 30 << 20,
        "{}",
        rest.len()
    );
    let directory = tempfile::tempdir()?;
    let target = directory.path().join("large");
    let late = ["volume", "get", "w", "large", text(&target)?, "--json"];
    // A node that is silent for four seconds is no longer live.
    let (class, _) = failure_of(&world.bafs_command(&late).output()?)?;
    ensure!(class == "unreachable" || class == "not_found", "{class}");
    ensure!(
        fs::read_dir(directory.path())?.next().is_none(),
        "something is left"
    );
    Ok(())
}

#[test]
fn cluster_extract_from_a_killed_node_is_unreachable() -> Result<()> {
    let mut world = TestCluster::start_with_home_rate(&["60MB"], Some("1MB/s"))?;
    world.wait_for_servers(2)?;
    world.run_json(&["volume", "create", "w", "--node", "n1", "--size", "50MB"])?;
    let file = world.home.path().join("large");
    fs::write(&file, vec![3; 20 << 20])?;
    world.run_json(&["volume", "put", "w", text(&file)?])?;
    let extract = [
        "volume",
        "extract",
        "w",
        "large",
        "bafs://home/out",
        "--json",
    ];
    let mut extract = world.bafs_command(&extract);
    let extract = extract
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    std::thread::sleep(Duration::from_secs(2));
    world.cluster.kill("n1")?;
    let output = extract.wait_with_output()?;
    let failure = failure_of(&output)?;
    ensure!(
        failure == ("unreachable".to_owned(), 75),
        "{}",
        printed_text(&output)
    );
    ensure!(world.read_home("out").is_err(), "half a file is at home");
    Ok(())
}
