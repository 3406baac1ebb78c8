//! What pipelines need of the language, with real jobs: scripts of any interpreter on a node, a
//! pattern at a home, files that jobs declare, and a look at the homes before a run.

use anyhow::{Result, ensure};
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};

/// Two files at home, and a workflow beside them that runs a script for each.
const SCRIPTS: &str = r#"
for file in glob("bafs://home/reads/*.txt")
  volume in.$(stem(file)) scratch 1 MB from $(file)
  volume out.$(stem(file)) scratch 1 MB
  job shell.$(stem(file)) {
    script = <<END
      words=$(wc -w < /in/$(basename(file)))
      echo "$1: $((words + 1))" > /out/shell
    END
    arguments = 'one word'
    produces  = /out/shell
  }
  job awk.$(stem(file)) {
    interpreter = awk -f
    arguments   = /in/$(basename(file))
    output      = awk
    script      = <<END
      { print toupper($0) }
    END
    directory   = /out
    requires    = shell /in/$(basename(file))
  }
  parent shell.$(stem(file)) child awk.$(stem(file))
  mount in.$(stem(file)) shell.$(stem(file)) /in ro
  mount in.$(stem(file)) awk.$(stem(file)) /in ro
  mount out.$(stem(file)) shell.$(stem(file)) /out
  mount out.$(stem(file)) awk.$(stem(file)) /out
  extract out.$(stem(file)) shell bafs://home/out/$(stem(file)).shell
  extract out.$(stem(file)) awk bafs://home/out/$(stem(file)).awk
end
"#;

#[test]
fn cluster_runs_scripts_for_files_of_a_home() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_runs_scripts_for_files_of_a_home", &reason);
        return Ok(());
    }
    let world = TestCluster::start(&["100MB"])?;
    world.wait_for_servers(2)?;
    let home = world.home.path();
    std::fs::create_dir(home.join("reads"))?;
    std::fs::write(home.join("reads/a.txt"), "some words\n")?;
    std::fs::write(home.join("reads/b.txt"), "three more words\n")?;
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("w.bafs");
    std::fs::write(&path, SCRIPTS)?;
    let path = path.to_string_lossy();
    for arguments in [["check", &path], ["run", &path]] {
        let output = world.bafs_command(&arguments).output()?;
        ensure!(output.status.success(), "{}", printed_text(&output));
    }
    let result = |name: &str| std::fs::read_to_string(home.join("out").join(name));
    ensure!(result("a.shell")? == "one word: 3\n");
    ensure!(result("b.shell")? == "one word: 4\n");
    ensure!(result("a.awk")? == "SOME WORDS\n");
    ensure!(result("b.awk")? == "THREE MORE WORDS\n");

    // What is known before a run: a source that is gone.
    std::fs::write(
        directory.path().join("gone.bafs"),
        "volume v cache bafs://home/none 1 MB\nmount v a /v\njob a {\nexecutable = true\n}\n",
    )?;
    let gone = directory.path().join("gone.bafs");
    let output = world
        .bafs_command(&["check", "--json", &gone.to_string_lossy()])
        .output()?;
    let said = printed_text(&output);
    ensure!(output.status.code() == Some(1), "{said}");
    ensure!(said.contains(r#""kind":"source_missing""#), "{said}");
    let output = world
        .bafs_command(&["run", &gone.to_string_lossy()])
        .output()?;
    let said = printed_text(&output);
    ensure!(output.status.code() == Some(1), "{said}");
    let expected = "nothing was run: jobs lack what they need\n\
                    error: 1 source of a volume is not at its home\n  bafs://home/none (volume v)";
    ensure!(said.contains(expected), "{said}");
    let journal = directory.path().join("gone.bafs.journal");
    ensure!(!journal.exists(), "a run began");
    Ok(())
}

#[test]
fn cluster_fails_jobs_without_their_files() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_fails_jobs_without_their_files", &reason);
        return Ok(());
    }
    let world = TestCluster::start(&["100MB"])?;
    world.wait_for_servers(2)?;
    let directory = tempfile::tempdir()?;
    let run = |name: &str, keys: &str| -> Result<String> {
        let path = directory.path().join(name);
        let text = format!("volume w scratch 1 MB\nmount w a /w\njob a {{\n{keys}\n}}\n");
        std::fs::write(&path, text)?;
        let output = world
            .bafs_command(&["run", &path.to_string_lossy()])
            .output()?;
        ensure!(output.status.code() == Some(1), "{}", printed_text(&output));
        Ok(printed_text(&output))
    };
    let said = run("produces.bafs", "executable = true\nproduces = made")?;
    ensure!(
        said.contains("nothing is at /w/made, which 'produces' names"),
        "{said}"
    );
    let said = run("requires.bafs", "executable = true\nrequires = given")?;
    ensure!(
        said.contains("nothing is at /w/given, which 'requires' names"),
        "{said}"
    );
    Ok(())
}
