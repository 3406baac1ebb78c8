//! The volume API by hand, on real processes: `bafs volume …`, `bafs servers`, wrong use.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use bafs_tests::{World, cannot_mount, program, said, skip};

fn world(nodes: &[&str]) -> Result<World> {
    let world = World::start(nodes)?;
    world.wait_for_servers(nodes.len() + 1)?;
    Ok(world)
}

#[test]
fn cluster_volumes_live_and_die() -> Result<()> {
    let world = world(&["10MB", "10MB"])?;
    world.put("in/a.txt", b"hello\n")?;
    let create = ["volume", "create", "v", "--node", "n1", "--size", "1MB"];
    let made = world.json(&[&create[..], &["--from", "bafs://home/in"]].concat())?;
    ensure!(
        made["state"] == "ready" && made["used_files"] == 1,
        "{made}"
    );
    let shown = world.json(&["volume", "show", "v"])?;
    ensure!(shown["id"] == made["id"], "{shown}");
    let copy = world.json(&["volume", "replicate", "v", "--to", "n2"])?;
    ensure!(copy["node"] == "n2" && copy["used_files"] == 1, "{copy}");
    let id = copy["id"].as_str().context("an id")?;
    let receipt = world.json(&["volume", "extract", id, "a.txt", "bafs://home/out/b.txt"])?;
    ensure!(receipt["size"] == 6, "{receipt}");
    ensure!(world.get("out/b.txt")? == b"hello\n", "the file is at home");
    let ambiguous = world.bafs(&["volume", "show", "v"]).output()?;
    ensure!(!ambiguous.status.success(), "two volumes have this name");
    ensure!(said(&ambiguous).contains(id), said(&ambiguous));
    for id in [id, made["id"].as_str().context("an id")?] {
        world.json(&["volume", "delete", id])?;
    }
    ensure!(
        world
            .json(&["volume", "list"])?
            .as_array()
            .is_some_and(Vec::is_empty),
        "all gone"
    );
    Ok(())
}

#[test]
fn cluster_volumes_survive_a_killed_node() -> Result<()> {
    let mut world = world(&["10MB"])?;
    world.put("in/a.txt", b"hello\n")?;
    let create = ["volume", "create", "v", "--node", "n1", "--size", "1MB"];
    let made = world.json(&[&create[..], &["--from", "bafs://home/in/a.txt"]].concat())?;
    world.json(&[
        "volume",
        "create",
        "c",
        "--node",
        "n1",
        "--size",
        "1MB",
        "--cache",
        "bafs://home/in",
    ])?;
    world.cluster.kill("n1")?;
    world.cluster.restart("n1")?;
    let shown = world.json(&["volume", "show", "v"])?;
    ensure!(
        shown["id"] == made["id"] && shown["state"] == "ready",
        "{shown}"
    );
    world.json(&["volume", "extract", "v", "a.txt", "bafs://home/out/c.txt"])?;
    ensure!(
        world.get("out/c.txt")? == b"hello\n",
        "the file came through"
    );
    world.json(&["volume", "invalidate", "c"])?;
    Ok(())
}

#[test]
fn cluster_space_is_never_promised_twice() -> Result<()> {
    let world = world(&["10MB"])?;
    world.json(&["volume", "create", "a", "--node", "n1", "--size", "6MB"])?;
    let second = world
        .bafs(&["volume", "create", "b", "--node", "n1", "--size", "6MB"])
        .output()?;
    ensure!(second.status.code() == Some(1), said(&second));
    ensure!(said(&second).contains("NoSpaceBytes"), said(&second));
    world.json(&["volume", "delete", "a"])?;
    world.json(&["volume", "create", "b", "--node", "n1", "--size", "6MB"])?;
    Ok(())
}

#[test]
fn cluster_refuses_strangers_and_wrong_use() -> Result<()> {
    let world = world(&["10MB"])?;
    let other = tempfile::tempdir()?;
    let identity = other.path().join("identity");
    let init = Command::new(program())
        .arg("init")
        .arg(&identity)
        .output()?;
    ensure!(init.status.success(), said(&init));
    let again = Command::new(program())
        .arg("init")
        .arg(&identity)
        .output()?;
    ensure!(
        again.status.code() == Some(1),
        "an authority is never overwritten"
    );
    let stranger = world
        .bafs(&["servers"])
        .env("BAFS_IDENTITY", &identity)
        .output()?;
    ensure!(stranger.status.code() == Some(1), said(&stranger));
    let missing = world
        .bafs(&["servers"])
        .env("BAFS_IDENTITY", "/no/such/dir")
        .output()?;
    ensure!(said(&missing).contains("bafs init"), said(&missing));
    let nobody = world
        .bafs(&["servers"])
        .env("BAFS_CATALOG", "127.0.0.1:9")
        .output()?;
    ensure!(said(&nobody).contains("127.0.0.1:9"), said(&nobody));
    let no_node = world
        .bafs(&["volume", "create", "v", "--node", "x", "--size", "1MB"])
        .output()?;
    ensure!(
        said(&no_node).contains("no live node 'x'; live are: n1"),
        said(&no_node)
    );
    let taken = world.cluster.address("n1");
    let port = world.bafs(&["catalog", "--listen", taken]).output()?;
    ensure!(
        port.status.code() == Some(1) && said(&port).contains("in use"),
        said(&port)
    );
    let vague = world.bafs(&["catalog", "--listen", "0.0.0.0:0"]).output()?;
    ensure!(said(&vague).contains("name the address"), said(&vague));
    let size = world
        .bafs(&["volume", "create", "v", "--node", "n1", "--size", "10"])
        .output()?;
    ensure!(
        size.status.code() == Some(1),
        "a size without unit is refused: {}",
        said(&size)
    );
    Ok(())
}

/// What `bafs grant` makes mounts its volume and lists servers; it does nothing else, and sees no
/// other volume.
#[test]
fn cluster_grants_are_for_their_volumes_only() -> Result<()> {
    let world = world(&["20MB"])?;
    for name in ["mine", "other"] {
        world.json(&["volume", "create", name, "--node", "n1", "--size", "1MB"])?;
    }
    world.put("data/f", b"hello\n")?;
    let cache = ["volume", "create", "shown", "--node", "n1", "--size", "1MB"];
    world.json(&[&cache[..], &["--cache", "bafs://home/data"]].concat())?;
    let directory = tempfile::tempdir()?;
    let with = |identity: &str, args: &[&str]| {
        let mut command = world.bafs(args);
        command.env("BAFS_IDENTITY", directory.path().join(identity));
        command.output()
    };
    for (to, more) in [("rw", &[][..]), ("ro", &["--read-only"])] {
        let to = directory.path().join(to);
        let to = to.to_str().context("a path of text")?;
        world.json(&[&["grant", "mine", "--to", to][..], more].concat())?;
        let again = world.bafs(&["grant", "mine", "--to", to]).output()?;
        ensure!(again.status.code() == Some(1), "{}", said(&again));
    }
    for identity in ["rw", "ro"] {
        let listed = with(identity, &["volume", "list", "--json"])?;
        let text = said(&listed);
        ensure!(listed.status.success(), "{text}");
        ensure!(text.contains("mine") && !text.contains("other"), "{text}");
        for refused in [
            &["volume", "delete", "mine"][..],
            &["volume", "show", "other"],
            &["volume", "create", "new", "--node", "n1", "--size", "1MB"],
        ] {
            let output = with(identity, refused)?;
            ensure!(output.status.code() == Some(1), "{}", said(&output));
        }
        // Each of these is possible for others.
        for refused in [
            &["volume", "extract", "mine", "f", "bafs://home/f"][..],
            &["volume", "replicate", "mine", "--to", "n1"],
            &["volume", "invalidate", "shown"],
            &["volume", "warm", "shown"],
        ] {
            let output = with(identity, refused)?;
            let text = said(&output);
            ensure!(output.status.code() == Some(1), "{refused:?}: {text}");
            ensure!(!text.contains("usage"), "{refused:?}: {text}");
        }
        let servers = with(identity, &["servers"])?;
        ensure!(servers.status.success() && said(&servers).contains("n1"));
    }
    ensure!(world.get("f").is_err(), "something was sent home");
    if let Some(reason) = cannot_mount() {
        skip("cluster_grants_are_for_their_volumes_only (jobs)", &reason);
        return Ok(());
    }
    let job = |identity: &str, mount: &str, script: &str| {
        let args = ["exec", "--mount", mount, "--", "/bin/sh", "-ec", script];
        with(identity, &args)
    };
    let written = job("rw", "mine:/vol", "echo hello > /vol/f")?;
    ensure!(written.status.success(), "{}", said(&written));
    let read = job("ro", "mine:/vol:ro", "cat /vol/f")?;
    ensure!(read.stdout == b"hello\n", "{}", said(&read));
    for (identity, mount) in [("ro", "mine:/vol"), ("rw", "other:/vol")] {
        let refused = job(identity, mount, "echo changed > /vol/f")?;
        ensure!(!refused.status.success(), "{}", said(&refused));
    }
    let read = job("ro", "mine:/vol:ro", "cat /vol/f")?;
    ensure!(read.stdout == b"hello\n", "{}", said(&read));
    Ok(())
}
