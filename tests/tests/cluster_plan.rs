//! `bafs plan` without an environment: for what is free on the nodes that a catalog lists.

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, printed_text};
use serde_json::Value;

const RATE_OPTIONS: [&str; 4] = ["--home-rate", "10 MB/s", "--local-rate", "100 MB/s"];

/// Four pipelines of one job that need 80 MB each.
const WORKFLOW: &str = "for i in 1..4\n\
    volume v$(i) scratch 80 MB\n\
    job a$(i) {\n\
      executable = /bin/true\n\
      runtime = 10 s\n\
    }\n\
    mount v$(i) a$(i) /v\n\
    end\n";

fn run_plan(world: &TestCluster, more: &[&str]) -> Result<Value> {
    let workflow = world.write_workflow(WORKFLOW)?;
    let workflow = workflow.to_str().context("a path is text")?;
    world.run_json(&[&["plan", workflow], more].concat())
}

fn plan_error(world: &TestCluster, more: &[&str]) -> Result<String> {
    let workflow = world.write_workflow(WORKFLOW)?;
    let mut command = world.bafs_command(&["plan"]);
    let output = command.arg(workflow).args(more).output()?;
    ensure!(
        !output.status.success(),
        "it is planned: {}",
        printed_text(&output)
    );
    Ok(printed_text(&output))
}

fn planned_storage(plan: &Value) -> Result<Vec<(u64, u64)>> {
    let nodes = plan["environment"]["nodes"].as_array().context("nodes")?;
    let number = |node: &Value, name: &str| node[name].as_u64().context("a number");
    let kinds = nodes.iter().map(|node| {
        let bytes = number(node, "storage_bytes")?;
        Ok((number(node, "count")?, bytes))
    });
    kinds.collect()
}

#[test]
fn cluster_plan_counts_currently_free_space() -> Result<()> {
    let world = TestCluster::start(&["300 MB", "300 MB"])?;
    world.wait_for_servers(3)?;
    let plan_of = |world: &TestCluster| run_plan(world, &RATE_OPTIONS);
    let empty = plan_of(&world)?;
    let kinds = planned_storage(&empty)?;
    ensure!(kinds.iter().map(|kind| kind.0).sum::<u64>() == 2, "{empty}");
    ensure!(kinds.iter().all(|kind| kind.1 > 250_000_000), "{kinds:?}");
    ensure!(
        empty["environment"]["home_bytes_per_s"] == 10_000_000,
        "{empty}"
    );
    ensure!(empty["candidates"][0]["shortage"].is_null(), "{empty}");
    // A volume takes most of one node: beside it three pipelines fit, not four.
    let taken = [
        "volume", "create", "big", "--node", "n1", "--size", "250 MB",
    ];
    let made = world.bafs_command(&taken).output()?;
    ensure!(made.status.success(), "{}", printed_text(&made));
    for _ in 0..100 {
        let full = plan_of(&world)?;
        let missing = &full["candidates"][0]["shortage"]["placement"]["missing_volumes"];
        if missing == 1 {
            return Ok(());
        }
        // The catalog hears of it with the node's next advert.
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    anyhow::bail!("the plan does not see what is taken: {}", plan_of(&world)?);
}

#[test]
fn cluster_plan_names_missing_nodes_and_rates() -> Result<()> {
    let world = TestCluster::start(&[])?;
    let told = plan_error(&world, &[])?;
    ensure!(told.contains("--home-rate and --local-rate"), "{told}");
    let told = plan_error(&world, &RATE_OPTIONS)?;
    ensure!(told.contains("lists no node"), "{told}");
    let workflow = world.write_workflow(WORKFLOW)?;
    let mut command = world.bafs_command(&["plan"]);
    command
        .env_remove("BAFS_CATALOG")
        .env_remove("BAFS_IDENTITY");
    let told = printed_text(&command.arg(workflow).output()?);
    ensure!(told.contains("--environment FILE"), "{told}");
    Ok(())
}
