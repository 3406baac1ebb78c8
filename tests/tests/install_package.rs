//! What users install: the Debian package, and the mount helper in it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::wait_until;
use bafs_tests::{bafs_program, exec_job, find_tool, printed_text, report_skip};

/// `cargo xtask dist` installs the package into an empty root and lets systemd read its units.
#[test]
fn package_installs_into_an_empty_root() -> Result<()> {
    if find_tool("dpkg-deb").is_none() {
        report_skip(
            "package_installs_into_an_empty_root",
            "there is no dpkg-deb",
        );
        return Ok(());
    }
    let output = tempfile::tempdir()?;
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut command = Command::new(env!("CARGO"));
    command
        .args([
            "run",
            "--quiet",
            "--package",
            "xtask",
            "--",
            "dist",
            "--program",
        ])
        .arg(bafs_program())
        .arg("--output")
        .arg(output.path())
        .current_dir(checkout);
    let made = command.output()?;
    ensure!(made.status.success(), "{}", printed_text(&made));
    let packages = fs::read_dir(output.path())?.flatten();
    ensure!(
        packages.count() == 1,
        "only the package is left: {}",
        printed_text(&made)
    );
    Ok(())
}

#[test]
fn mount_helper_mounts_a_volume() -> Result<()> {
    let test = "mount_helper_mounts_a_volume";
    if !nix::unistd::geteuid().is_root() {
        report_skip(test, "only root mounts and unmounts at once");
        return Ok(());
    }
    let Some(world) = exec_job::start_cluster(test, "50MB")? else {
        return Ok(());
    };
    world.run_json(&["volume", "create", "v", "--node", "n1", "--size", "10MB"])?;
    let directory = tempfile::tempdir()?;
    let (helper, point) = (
        directory.path().join("mount.bafs"),
        directory.path().join("m"),
    );
    symlink(bafs_program(), &helper)?;
    fs::create_dir(&point)?;
    let source = format!("{}/v", world.cluster.catalog_address());
    let options = format!("rw,_netdev,identity={}", world.cluster.identity().display());
    let mount = |source: &str| {
        let mut command = Command::new(&helper);
        command
            .arg(source)
            .arg(&point)
            .args(["-o", &options])
            .env("BAFS_CONFIG", "")
            .output()
    };
    let mounted = mount(&source)?;
    ensure!(mounted.status.success(), "{}", printed_text(&mounted));
    fs::write(point.join("file"), "text")?;
    let unmounted = Command::new("umount").arg(&point).output()?;
    ensure!(unmounted.status.success(), "{}", printed_text(&unmounted));
    ensure!(!point.join("file").exists(), "it is still mounted");
    // The volume is free again when the background process has ended.
    wait_until(Duration::from_secs(20), || {
        Ok(mount(&source)?.status.success())
    })
    .context("mount it again")?;
    ensure!(fs::read_to_string(point.join("file"))? == "text");
    ensure!(Command::new("umount").arg(&point).status()?.success());
    let refused = mount("127.0.0.1:1/v")?;
    let said = printed_text(&refused);
    ensure!(
        refused.status.code() == Some(32) && said.contains("127.0.0.1:1"),
        "{said}"
    );
    Ok(())
}
