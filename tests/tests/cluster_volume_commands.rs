//! `bafs volume` as other schedulers use it: classes of failures, chosen ids, sizes and lifetimes,
//! and names while other volumes come and go.

use std::collections::BTreeSet;
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, printed_text};
use serde_json::Value;

fn start_cluster(nodes: &[&str]) -> Result<TestCluster> {
    let world = TestCluster::start(nodes)?;
    world.wait_for_servers(nodes.len() + 1)?;
    Ok(world)
}

/// The failure that a command printed: its only line of standard output.
pub(crate) fn failure_of(output: &Output) -> Result<(String, i32)> {
    let text = || printed_text(output);
    let printed: Value = serde_json::from_slice(&output.stdout).with_context(text)?;
    let error = &printed["error"];
    for field in ["message", "remedy"] {
        let words = error[field].as_str().unwrap_or_default();
        ensure!(!words.is_empty(), "no {field}: {}", text());
    }
    let class = error["class"].as_str().with_context(text)?;
    let code = output.status.code().with_context(text)?;
    Ok((class.to_owned(), code))
}

#[track_caller]
fn expect_failure(world: &TestCluster, args: &[&str], class: &str, code: i32) -> Result<()> {
    let output = world.bafs_command(args).arg("--json").output()?;
    let found = failure_of(&output)?;
    ensure!(
        found == (class.to_owned(), code),
        "{args:?}: {}",
        printed_text(&output)
    );
    Ok(())
}

const ID: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn cluster_volume_failures_have_their_documented_classes() -> Result<()> {
    let world = start_cluster(&["10MB", "10MB"])?;
    world.write_home("in/a.txt", b"hello\n")?;
    let create = ["volume", "create", "v", "--node", "n1", "--size", "1MB"];
    world.run_json(&[&create[..], &["--from", "bafs://home/in"]].concat())?;
    world.run_json(&["volume", "replicate", "v", "--to", "n2"])?;
    let cache = ["volume", "create", "c", "--node", "n1", "--size", "1MB"];
    world.run_json(&[&cache[..], &["--cache", "bafs://home/in"]].concat())?;
    world.run_json(&["volume", "create", "w", "--node", "n1", "--size", "1MB"])?;
    let directory = tempfile::tempdir()?;
    let there = directory.path().to_str().context("a path of text")?;
    let file = directory.path().join("f");
    std::fs::write(&file, "x")?;
    let file = file.to_str().context("a path of text")?;
    check_wrong_commands(&world, there, file)?;
    check_wrong_identities(&world, there, file)
}

fn check_wrong_commands(world: &TestCluster, there: &str, file: &str) -> Result<()> {
    for (args, class, code) in [
        (&["show", "x"][..], "not_found", 4),
        (&["show", ID], "not_found", 4),
        (&["delete", "new\nline"], "not_found", 4),
        (&["delete", "v"], "ambiguous", 10),
        (&["ls", "w", "none"], "not_found", 4),
        (&["ls", "w", "../x"], "invalid_use", 2),
        (&["get", "w", "none", there], "not_found", 4),
        (&["get", "c", "/", there], "exists", 7),
        (&["put", "c", file], "wrong_state", 5),
        (&["put", "w", "/no/such/file"], "local_file", 13),
        (&["put", "w", file, ".bafs-put/f"], "invalid_use", 2),
        (&["extract", "w", "none", "bafs://home/x"], "not_found", 4),
        (
            &["extract", "w", "none/", "bafs://home/x"],
            "invalid_use",
            2,
        ),
        (
            &["extract", "w", "none", "bafs://elsewhere/x"],
            "unreachable",
            75,
        ),
        (&["warm", "w"], "wrong_state", 5),
        (&["invalidate", "w"], "wrong_state", 5),
        (&["replicate", "w", "--to", "n1"], "wrong_state", 5),
        (&["replicate", "w", "--to", "n9"], "unreachable", 75),
        (&["resize", "w", "--size", "20MB"], "no_space", 6),
        (&["resize", "w", "--size", "large"], "invalid_use", 2),
        (&["renew", "x"], "not_found", 4),
        (
            &["create", "new\nline", "--node", "n1", "--size", "1MB"],
            "invalid_use",
            2,
        ),
        (
            &["create", "n", "--node", "n9", "--size", "1MB"],
            "unreachable",
            75,
        ),
        (
            &["create", "n", "--node", "n1", "--size", "1GB"],
            "no_space",
            6,
        ),
        (
            &["create", "n", "--node", "n1", "--size", "1MB", "--id", "7"],
            "invalid_use",
            2,
        ),
        (&["create", "n", "--node", "n1"], "invalid_use", 2),
    ] {
        expect_failure(world, &[&["volume"][..], args].concat(), class, code)?;
    }
    Ok(())
}

fn check_wrong_identities(world: &TestCluster, there: &str, file: &str) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let nobody = ["volume", "list", "--catalog", "127.0.0.1:9"];
    expect_failure(world, &nobody, "unreachable", 75)?;
    expect_failure(
        world,
        &["volume", "list", "--identity", there],
        "invalid_use",
        2,
    )?;
    let granted = directory.path().join("reader");
    let granted = granted.to_str().context("a path of text")?;
    world.run_json(&["grant", "w", "--read-only", "--to", granted])?;
    for args in [
        &["put", "w", file][..],
        &["delete", "w"],
        &["resize", "w", "--size", "2MB"],
    ] {
        let args = [&["volume"][..], args, &["--identity", granted]].concat();
        expect_failure(world, &args, "denied", 3)?;
    }
    Ok(())
}

#[test]
fn cluster_chosen_ids_make_creation_repeatable() -> Result<()> {
    let mut world = start_cluster(&["20MB", "20MB"])?;
    world.write_home("in/a.txt", b"hello\n")?;
    let create = [
        "volume",
        "create",
        "v",
        "--node",
        "n1",
        "--id",
        ID,
        "--from",
        "bafs://home/in",
    ];
    let same = [&create[..], &["--size", "1MB"]].concat();
    for _ in 0..3 {
        let made = world.run_json(&same)?;
        ensure!(made["id"] == ID && made["used_files"] == 1, "{made}");
        // A longer lifetime is no other description.
        world.run_json(&["volume", "renew", ID, "--lifetime-hours", "72"])?;
    }
    expect_failure(
        &world,
        &[&create[..], &["--size", "2MB"]].concat(),
        "exists",
        7,
    )?;
    let elsewhere = [
        "volume", "create", "v", "--node", "n2", "--id", ID, "--size", "1MB",
    ];
    expect_failure(&world, &elsewhere, "exists", 7)?;
    // A node that was killed has it still.
    world.cluster.kill("n1")?;
    world.cluster.restart("n1")?;
    world.run_json(&same)?;
    let copy_id = "f".repeat(32);
    let replicate = ["volume", "replicate", ID, "--to", "n2", "--id", &copy_id];
    let copy = world.run_json(&replicate)?;
    ensure!(copy["id"] == copy_id.as_str(), "{copy}");
    let origin = &copy["origin"];
    ensure!(
        origin["kind"] == "volume" && origin["volume"] == ID,
        "{copy}"
    );
    let listed = world.run_json(&["volume", "list"])?;
    ensure!(listed.as_array().map(Vec::len) == Some(2), "{listed}");
    world.run_json(&["volume", "delete", ID])?;
    // The original is gone, and what it was is known.
    ensure!(world.run_json(&replicate)?["id"] == copy_id.as_str());
    let other = [
        "volume",
        "replicate",
        &copy_id,
        "--to",
        "n1",
        "--id",
        &copy_id,
    ];
    expect_failure(&world, &other, "exists", 7)?;
    // An id is never used again.
    expect_failure(&world, &same, "lost", 9)?;
    Ok(())
}

#[test]
fn cluster_volumes_change_size_and_lifetime() -> Result<()> {
    let world = start_cluster(&["10MB"])?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("f");
    std::fs::write(&file, vec![7; 3 << 20])?;
    let file = file.to_str().context("a path of text")?;
    world.run_json(&["volume", "create", "w", "--node", "n1", "--size", "1MB"])?;
    expect_failure(&world, &["volume", "put", "w", file], "no_space", 6)?;
    let shown = world.run_json(&["volume", "show", "w"])?;
    ensure!(
        shown["used_files"] == 0,
        "something of a failed put is left: {shown}"
    );
    let resized = world.run_json(&["volume", "resize", "w", "--size", "6MB"])?;
    ensure!(resized["size_bytes"] == 6_000_000, "{resized}");
    world.run_json(&["volume", "put", "w", file])?;
    // What is promised is promised once.
    let second = ["volume", "create", "x", "--node", "n1", "--size", "5MB"];
    expect_failure(&world, &second, "no_space", 6)?;
    expect_failure(
        &world,
        &["volume", "resize", "w", "--size", "2MB"],
        "wrong_state",
        5,
    )?;
    world.run_json(&["volume", "resize", "w", "--size", "4MB"])?;
    world.run_json(&second)?;
    world.write_home("in/a", &[1; 100_000])?;
    let cache = ["volume", "create", "c", "--node", "n1", "--size", "500KB"];
    world.run_json(&[&cache[..], &["--cache", "bafs://home/in"]].concat())?;
    let smaller = world.run_json(&["volume", "resize", "c", "--size", "200KB"])?;
    ensure!(smaller["size_bytes"] == 200_000, "{smaller}");
    let before = world.run_json(&["volume", "show", "w"])?;
    let renew = ["volume", "renew", "w", "x", "--lifetime-hours", "72"];
    let renewed = world.run_json(&renew)?;
    ensure!(renewed.as_array().map(Vec::len) == Some(2), "{renewed}");
    let time = |shown: &Value| shown["expires"].as_u64().unwrap_or(0);
    let longer = time(&renewed[0]) - time(&before);
    ensure!(longer > 47 * 3_600_000, "{longer} ms more: {renewed}");
    Ok(())
}

#[test]
fn cluster_resized_volumes_keep_their_size_after_restarts() -> Result<()> {
    let mut world = start_cluster(&["10MB"])?;
    world.write_home("in/a", &[1; 100_000])?;
    world.run_json(&["volume", "create", "w", "--node", "n1", "--size", "1MB"])?;
    let cache = ["volume", "create", "c", "--node", "n1", "--size", "500KB"];
    world.run_json(&[&cache[..], &["--cache", "bafs://home/in"]].concat())?;
    for name in ["w", "c"] {
        world.run_json(&["volume", "resize", name, "--size", "3MB"])?;
    }
    world.cluster.kill("n1")?;
    world.cluster.restart("n1")?;
    for name in ["w", "c"] {
        let shown = world.run_json(&["volume", "show", name])?;
        ensure!(shown["size_bytes"] == 3_000_000, "{shown}");
    }
    let third = ["volume", "create", "x", "--node", "n1", "--size", "5MB"];
    expect_failure(&world, &third, "no_space", 6)
}

#[test]
fn cluster_json_has_ids_as_text() -> Result<()> {
    let world = start_cluster(&["10MB"])?;
    world.write_home("in/a", b"a")?;
    let cache = ["volume", "create", "c", "--node", "n1", "--size", "1MB"];
    let made = world.run_json(&[&cache[..], &["--cache", "bafs://home/in"]].concat())?;
    ensure!(made["origin"]["path"] == "in", "{made}");
    let home = made["origin"]["home"].as_str().context("the home's id")?;
    let find = |servers: &Value, name: &str| {
        let found = servers.as_array().into_iter().flatten();
        found.into_iter().find(|it| it["name"] == name).cloned()
    };
    for _ in 0..100 {
        let servers = world.run_json(&["servers"])?;
        let known = find(&servers, "home").context("a home")?;
        ensure!(known["id"] == home, "{servers}");
        let node = find(&servers, "n1").context("a node")?;
        ensure!(
            node["id"].as_str().is_some_and(|id| id.len() == 16),
            "{node}"
        );
        if node["caches"][0]["volume"] == made["id"] {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    anyhow::bail!("the node advertises no cache")
}

/// Runs `work` in turn until the others are done, each in a thread of its own.
fn repeat_until(is_over: &AtomicBool, mut work: impl FnMut(u32) -> Result<()>) -> Result<u32> {
    let mut rounds = 0;
    while !is_over.load(Ordering::Relaxed) {
        work(rounds)?;
        rounds += 1;
    }
    Ok(rounds)
}

#[test]
fn cluster_volumes_are_found_while_others_vanish() -> Result<()> {
    let world = start_cluster(&["60MB", "60MB"])?;
    let create = |name: &str, node: &str| {
        world.run_json(&["volume", "create", name, "--node", node, "--size", "100KB"])
    };
    let kept = BTreeSet::from(["kept-1", "kept-2"]);
    create("kept-1", "n1")?;
    create("kept-2", "n2")?;
    create("moving", "n1")?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut others = Vec::new();
        for number in 0..6 {
            let (create, is_over, world) = (&create, &is_over, &world);
            others.push(scope.spawn(move || {
                repeat_until(is_over, |round| {
                    let node = if (number + round) % 2 == 0 {
                        "n1"
                    } else {
                        "n2"
                    };
                    let made = create(&format!("t{number}"), node)?;
                    let id = made["id"].as_str().context("an id")?;
                    world.run_json(&["volume", "delete", id])?;
                    Ok(())
                })
            }));
        }
        // A volume of this name exists at any time.
        let (create, moved, world) = (&create, &is_over, &world);
        others.push(scope.spawn(move || {
            let mut last = world.run_json(&["volume", "show", "moving"])?["id"].clone();
            repeat_until(moved, |round| {
                let node = if round % 2 == 0 { "n2" } else { "n1" };
                let next = create("moving", node)?["id"].clone();
                world.run_json(&["volume", "delete", last.as_str().context("an id")?])?;
                last = next;
                Ok(())
            })
        }));
        let looks = (0..25).try_for_each(|_| -> Result<()> {
            let listed = world.run_json(&["volume", "list"])?;
            let names: BTreeSet<_> = listed
                .as_array()
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .iter()
                .filter_map(|it| it["name"].as_str())
                .collect();
            ensure!(names.is_superset(&kept), "{names:?}");
            for name in &kept {
                world.run_json(&["volume", "renew", name])?;
                world.run_json(&["volume", "ls", name])?;
            }
            world.run_json(&["volume", "show", "moving"])?;
            Ok(())
        });
        is_over.store(true, Ordering::Relaxed);
        let mut rounds = 0;
        for other in others {
            rounds += other.join().expect("a thread ends")?;
        }
        ensure!(rounds > 20, "{rounds} rounds: nothing was tested");
        looks
    })
}
