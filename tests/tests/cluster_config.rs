//! The configuration file, as the program of a user reads it.

use std::process::{Command, Output};

use anyhow::{Result, ensure};
use bafs_tests::{TestCluster, bafs_program, printed_text};

fn run(config: &std::path::Path, words: &[&str], variables: &[(&str, &str)]) -> Result<Output> {
    let mut command = Command::new(bafs_program());
    command.args(words).envs(variables.iter().copied());
    command.env("BAFS_CONFIG", config);
    Ok(command.output()?)
}

#[test]
fn configuration_file_names_the_cluster() -> Result<()> {
    let world = TestCluster::start(&["20MB"])?;
    world.wait_for_servers(2)?;
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("bafs.toml");
    let identity = world.cluster.identity().display().to_string();
    let catalog = world.cluster.catalog_address();
    std::fs::write(
        &config,
        format!("identity = '{identity}'\ncatalog = '{catalog}'\n"),
    )?;
    let listed = run(&config, &["servers", "--json"], &[])?;
    ensure!(listed.status.success(), "{}", printed_text(&listed));
    ensure!(String::from_utf8(listed.stdout)?.contains("\"n1\""));
    // The environment comes before the file, an option before both.
    let wrong = [("BAFS_CATALOG", "127.0.0.1:1")];
    let refused = run(&config, &["servers"], &wrong)?;
    ensure!(!refused.status.success() && printed_text(&refused).contains("127.0.0.1:1"));
    let listed = run(&config, &["servers", "--catalog", catalog], &wrong)?;
    ensure!(listed.status.success(), "{}", printed_text(&listed));
    let shown = run(&config, &["config"], &wrong)?;
    let shown = printed_text(&shown);
    let has_line = |key: &str, source: &str| {
        shown
            .lines()
            .any(|line| line.starts_with(key) && line.ends_with(source))
    };
    ensure!(has_line("catalog ", "BAFS_CATALOG"), "{shown}");
    ensure!(
        has_line("identity ", &config.display().to_string()),
        "{shown}"
    );
    ensure!(has_line("channel ", "default"), "{shown}");
    Ok(())
}

#[test]
fn faults_of_the_configuration_are_usage_errors() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("bafs.toml");
    for (text, expected) in [
        (
            "catalogue = 'x'\n",
            "bafs.toml:1: unknown key 'catalogue'; did you mean 'catalog'?",
        ),
        (
            "[command.node]\nslots = 'many'\n",
            "bafs.toml: this value may be from there",
        ),
    ] {
        std::fs::write(&config, text)?;
        let words = ["node", "--identity", "i", "--store", "s", "--size", "1MB"];
        let refused = run(&config, &words, &[])?;
        let said = printed_text(&refused);
        ensure!(
            refused.status.code() == Some(2) && said.contains(expected),
            "{said}"
        );
    }
    Ok(())
}
