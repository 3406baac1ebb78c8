//! Throw-away clusters: what they leave to others, and what they tell that only they can know.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use bafs_proto::ids::ServerId;
use bafs_tests::World;

#[test]
fn cluster_leaves_the_directory_of_another_home_of_its_export() -> Result<()> {
    for has_other in [false, true] {
        let world = World::start(&["20MB"])?;
        let own = world.home.path().join(".bafs-put");
        let id = || -> Result<ServerId> {
            let text = std::fs::read_to_string(own.join("server-id"))?;
            text.trim().parse().context("the id of a server")
        };
        let before = id()?;
        let mut other = world.bafs(&["home", "--name", "other", "--until-stdin-closes"]);
        other.arg("--export").arg(world.home.path());
        other.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut other = has_other.then(|| other.spawn()).transpose()?;
        if let Some(other) = &mut other {
            let stdout = other.stdout.take().context("it is piped")?;
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line)?;
            ensure!(line.contains("listening"), "the other home says {line:?}");
        }
        let World { cluster, home } = world;
        drop(cluster);
        if has_other {
            ensure!(id()? == before, "it is another server");
        } else {
            ensure!(!own.exists(), "{} is left", own.display());
        }
        if let Some(mut other) = other {
            drop(other.stdin.take());
            other.wait()?;
        }
        drop(home);
    }
    Ok(())
}
