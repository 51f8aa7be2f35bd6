//! `slackwater pool ...`.

use std::process::ExitCode;

use serde_json::json;

use super::{Failure, PoolArguments, PoolCommand, print, real_host};
use crate::backend::place::lvm;
use crate::config::{BadConfig, Given};
use crate::error::Error;
use crate::model::pool::NotAPool;
use crate::model::{PoolDefinition, PoolOptions, PoolPlace};
use crate::operation::pools::inventory::{self, PoolPresence};
use crate::operation::pools::{admin, node_record};

/// Runs one of the commands.
pub(super) fn run(command: PoolCommand) -> Result<ExitCode, Failure> {
    match command {
        PoolCommand::Init { pool, node } => init(&pool, &node.with_file(Given::default())?),
        PoolCommand::Adopt {
            pool,
            cluster: true,
            yes,
            driver_name,
            endpoint,
            node,
            dry_run: _,
        } => super::adopt::run(&super::adopt::Arguments {
            pool,
            source: super::adopt::DriverSource::given(driver_name, endpoint)?,
            yes,
            json: node.json,
        }),
        PoolCommand::HandOver {
            pool,
            to,
            endpoint,
            driver_name,
            json,
        } => {
            let source = super::adopt::DriverSource::given(driver_name, endpoint)?;
            super::hand_over::run(&pool, &to, &source, json)
        }
        PoolCommand::Adopt {
            pool,
            dry_run,
            node,
            ..
        } => adopt(&pool, dry_run, &node.with_file(Given::default())?),
        PoolCommand::Release { pool, node } => release(&pool, &node.with_file(Given::default())?),
        PoolCommand::Forget { pool, node } => forget(&pool, &node.with_file(Given::default())?),
        PoolCommand::List { place } => list(&place.with_file()?),
    }
}

fn only_real(pool: &PoolDefinition) -> Result<(), Failure> {
    match pool.place {
        PoolPlace::File { .. } | PoolPlace::Lvm { .. } => Ok(()),
        PoolPlace::Memory { .. } => Err(BadConfig(format!(
            "pool {:?}: a memory pool does not outlive its process; give NAME=file:/path or NAME=lvm:VG/POOL",
            pool.name
        ))
        .into()),
    }
}

fn init(pool: &PoolDefinition, arguments: &PoolArguments) -> Result<ExitCode, Failure> {
    only_real(pool)?;
    let host = real_host(&[], std::slice::from_ref(pool));
    let result = admin::init(host.as_ref(), &arguments.node_record, pool)?;
    for warning in &result.warnings {
        eprintln!("slackwater: pool {}: warning: {warning}", pool.name);
    }
    if arguments.json {
        print::json(&json!({
            "name": pool.name, "place": pool.place.to_string(), "id": result.pool.id,
            "home": result.pool.home, "changed": result.changed, "warnings": result.warnings,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let word = if result.changed {
        "was created"
    } else {
        "already exists"
    };
    print::line(format!(
        "pool {} {word}: {} at {}, home {}",
        pool.name, result.pool.id, pool.place, result.pool.home
    ));
    Ok(ExitCode::SUCCESS)
}

fn adopt(text: &str, dry_run: bool, arguments: &PoolArguments) -> Result<ExitCode, Failure> {
    let given = if text.contains('=') {
        let pool: PoolDefinition = text
            .parse()
            .map_err(|error: NotAPool| BadConfig(error.to_string()))?;
        only_real(&pool)?;
        Some(pool)
    } else {
        None
    };
    let given_too = given.iter().chain(&arguments.pools);
    let host = real_host(&[], &given_too.cloned().collect::<Vec<_>>());
    let pool = match given {
        Some(pool) => pool,
        None => get_pool(text, arguments, host.as_ref())?,
    };
    let (host, record, others) = (host.as_ref(), &arguments.node_record, &arguments.pools);
    let adopted = admin::adopt(host, record, &pool, others, dry_run)?;
    let (id, home) = (adopted.pool.id, adopted.pool.home);
    if arguments.json {
        print::json(&json!({
            "name": pool.name, "place": pool.place.to_string(), "id": id,
            "home": home, "changed": adopted.from.is_some() && !dry_run,
            "home_before": adopted.from,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    print::line(match adopted.from {
        None => format!(
            "pool {} already belongs to this machine, home {home}",
            pool.name
        ),
        Some(from) if dry_run => format!(
            "pool {} would belong to this machine with home {home}; its current home is {from}. Nothing was changed",
            pool.name
        ),
        Some(from) => format!(
            "pool {} now belongs to this machine, home {home}; its previous home was {from}. The PersistentVolumes of its volumes still have the old home; run: kubectl slackwater pool follow {id}",
            pool.name
        ),
    });
    Ok(ExitCode::SUCCESS)
}

/// Returns a pool by its name, in the configuration file or among the pools that this machine has
/// had.
fn get_pool(
    name: &str,
    arguments: &PoolArguments,
    host: &dyn crate::host::Host,
) -> Result<PoolDefinition, Failure> {
    if let Some(pool) = arguments.pools.iter().find(|pool| pool.name == name) {
        return Ok(pool.clone());
    }
    let node = node_record::load_node(host, &arguments.node_record)?;
    let known = node.pools.values().find(|known| known.name == name);
    known
        .and_then(|known| {
            PoolDefinition::from_parts(name, &known.place, PoolOptions::default()).ok()
        })
        .ok_or_else(|| {
            Failure::run(Error::refused(
                format!("pool {name}"),
                "this machine has no pool of this name; give NAME=file:/path",
            ))
        })
}

fn release(text: &str, arguments: &PoolArguments) -> Result<ExitCode, Failure> {
    let host = real_host(&[], &arguments.pools);
    let pool = match text.contains('=') {
        true => text
            .parse()
            .map_err(|error: NotAPool| BadConfig(error.to_string()))?,
        false => get_pool(text, arguments, host.as_ref())?,
    };
    let host = real_host(&[], std::slice::from_ref(&pool));
    let released = lvm::release(host.as_ref(), &pool)?;
    if arguments.json {
        print::json(&json!({
            "name": pool.name, "place": pool.place.to_string(), "changed": released,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    print::line(match released {
        true => format!(
            "pool {} is released: LVM can deactivate {}. The next start of the driver takes it again",
            pool.name, pool.place
        ),
        false => format!("pool {} was not in use", pool.name),
    });
    Ok(ExitCode::SUCCESS)
}

fn forget(which: &str, arguments: &PoolArguments) -> Result<ExitCode, Failure> {
    let host = real_host(&[], &arguments.pools);
    let (id, known) = admin::forget(host.as_ref(), &arguments.node_record, which)?;
    if arguments.json {
        print::json(&json!({ "id": id, "name": known.name, "place": known.place }));
    } else {
        print::line(format!(
            "pool {} ({id}, at {}) is forgotten: its volumes count as deleted",
            known.name, known.place
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn list(arguments: &PoolArguments) -> Result<ExitCode, Failure> {
    let host = real_host(&[], &arguments.pools);
    let entries = inventory::pools(host.as_ref(), &arguments.node_record, &arguments.pools)?;
    if arguments.json {
        let rows: Vec<_> = entries
            .iter()
            .map(|entry| {
                let problem = match &entry.state {
                    PoolPresence::Unreadable(problem) => Some(problem),
                    _ => None,
                };
                json!({
                    "name": entry.name, "place": entry.place, "id": entry.id, "home": entry.home,
                    "configured": entry.configured, "state": entry.state.as_str(), "problem": problem,
                })
            })
            .collect();
        print::json(&json!({ "pools": rows }));
        return Ok(ExitCode::SUCCESS);
    }
    let dash = || "-".to_string();
    let rows: Vec<[String; 5]> = entries
        .into_iter()
        .map(|entry| {
            [
                entry.name,
                entry.state.as_str().into(),
                entry.id.map_or_else(dash, |id| id.to_string()),
                entry.home.map_or_else(dash, |home| home.to_string()),
                entry.place,
            ]
        })
        .collect();
    print::table(["NAME", "STATE", "ID", "HOME", "PLACE"], &rows);
    Ok(ExitCode::SUCCESS)
}
