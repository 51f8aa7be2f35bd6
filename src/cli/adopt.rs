//! `slackwater pool adopt --cluster`: updates the PersistentVolumes of an adopted pool.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Failure, block_on, print, status};
use crate::config::{BadConfig, DriverName, Endpoint, Given};
use crate::error::Error;
use crate::router::adopt::{self, Done, Line, Plan, Step, VolumeAction};
use crate::router::{connect, csi_socket};

/// How long PVCs may take to be bound again: Kubernetes checks all of them every 15 s, and many
/// take some time.
const REBIND_TIMEOUT: Duration = Duration::from_secs(180);

/// The arguments of the command.
#[derive(Debug)]
pub(super) struct Arguments {
    /// UUID, name or NODE/NAME of the pool.
    pub(super) pool: String,
    /// The driver that owns it.
    pub(super) source: DriverSource,
    /// Apply the changes, and do not only show them.
    pub(super) yes: bool,
    /// Print JSON.
    pub(super) json: bool,
}

/// How to determine the driver that owns a pool.
#[derive(Debug)]
pub(super) struct DriverSource {
    /// The given name of the driver; otherwise the name comes from the driver at `endpoint`, or
    /// from the Pool object.
    driver: Option<String>,
    /// The controller's CSI socket.
    endpoint: Option<PathBuf>,
}

impl DriverSource {
    /// From the command line and the environment.
    pub(super) fn given(
        driver_name: Option<DriverName>,
        endpoint: Option<Endpoint>,
    ) -> Result<DriverSource, BadConfig> {
        let given = Given {
            endpoint,
            ..Given::default()
        };
        let given = given.with_env(std::env::var("CSI_ENDPOINT").ok())?;
        Ok(DriverSource {
            driver: driver_name.map(|name| name.0),
            endpoint: given.endpoint.map(|Endpoint(socket)| socket),
        })
    }
}

/// The name of the driver, if it was given or the driver at the socket reports it.
pub(super) async fn driver(source: &DriverSource) -> Result<Option<String>, Error> {
    match &source.endpoint {
        Some(socket) => {
            let (_, name) = csi_socket::driver(socket, source.driver.as_deref()).await?;
            Ok(Some(name))
        }
        None => Ok(source.driver.clone()),
    }
}

/// Shows what would be changed, or changes it. Exit code 1 if something could not be changed.
pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    block_on(async {
        let client = connect().await?;
        let driver = driver(&arguments.source).await?;
        let plan = adopt::make_plan(&client, driver.as_deref(), &arguments.pool).await?;
        if !arguments.yes {
            show(&plan, arguments.json);
            return Ok(ExitCode::SUCCESS);
        }
        let done = adopt::carry_out(&client, &plan, REBIND_TIMEOUT, print_step).await?;
        print_result(&plan, &done, arguments.json);
        Ok::<_, Failure>(status(done.left.is_empty()))
    })
}

/// Prints a line when a PersistentVolume is deleted for a moment and when it is created again,
/// which a user needs after a crash.
fn print_step(volume: &str, step: Step) {
    match step {
        Step::Delete => {
            eprintln!("slackwater: deleted PersistentVolume {volume}, to be recreated");
        }
        Step::Make => {
            eprintln!("slackwater: recreated PersistentVolume {volume}");
        }
        Step::Retain | Step::Note | Step::Release | Step::Strike | Step::Restore => {}
    }
}

fn action(plan: &Plan, line: &Line) -> String {
    match &line.action {
        VolumeAction::Move => format!("move to home {}", plan.pool.home),
        VolumeAction::Finish => "finish an interrupted move".into(),
        VolumeAction::Left(why) => format!("skip: {why}"),
    }
}

fn show(plan: &Plan, as_json: bool) {
    if as_json {
        let each = plan.lines.iter().map(|line| {
            let (what, reason) = match &line.action {
                VolumeAction::Move => ("move", None),
                VolumeAction::Finish => ("finish", None),
                VolumeAction::Left(why) => ("leave", Some(why)),
            };
            json!({
                "name": line.name, "claim": line.claim, "home_before": line.from,
                "what": what, "reason": reason,
            })
        });
        let volumes: Vec<Value> = each.collect();
        print::json(&json!({
            "pool": pool(plan), "changed": false, "persistent_volumes": volumes,
            "settled": plan.settled,
        }));
        return;
    }
    head(plan);
    if plan.lines.is_empty() {
        print::line("nothing to do");
        return;
    }
    let dash = || "-".to_string();
    let rows: Vec<[String; 4]> = plan
        .lines
        .iter()
        .map(|line| {
            [
                line.name.clone(),
                line.claim.clone().unwrap_or_else(dash),
                line.from.clone().unwrap_or_else(dash),
                action(plan, line),
            ]
        })
        .collect();
    print::table(["PERSISTENTVOLUME", "CLAIM", "HOME", "ACTION"], &rows);
    print::line("nothing was changed; run the same command with --yes to apply");
}

fn print_result(plan: &Plan, done: &Done, as_json: bool) {
    if as_json {
        let left: Vec<Value> = done
            .left
            .iter()
            .map(|(name, why)| json!({ "name": name, "reason": why }))
            .collect();
        print::json(&json!({
            "pool": pool(plan), "changed": !done.moved.is_empty(), "moved": done.moved,
            "left": left, "settled": plan.settled,
        }));
        return;
    }
    head(plan);
    for name in &done.moved {
        print::line(format!("{name} now has home {}", plan.pool.home));
    }
    for (name, why) in &done.left {
        print::line(format!("{name} was skipped: {why}"));
    }
    if done.moved.is_empty() && done.left.is_empty() {
        print::line("nothing had to be changed");
    }
}

fn head(plan: &Plan) {
    let pool = &plan.pool;
    print::line(format!(
        "pool {} ({}) is on node {}, home {}; {} PersistentVolumes are already correct",
        pool.name, pool.id, pool.node, pool.home, plan.settled
    ));
}

fn pool(plan: &Plan) -> Value {
    let pool = &plan.pool;
    json!({ "id": pool.id, "name": pool.name, "node": pool.node, "home": pool.home })
}
