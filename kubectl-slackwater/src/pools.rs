//! The commands about pools: their list, and the changes of a pool, which are fields of its Pool object or
//! requests to the agent of a node.

pub mod change;
pub mod follow;
pub mod health;
pub mod list;
pub mod object;
pub mod request;

use crate::change::follow;
use crate::cli::PoolCommand;
use crate::cluster::Cluster;
use crate::failure::Result;

use change::{evacuate, evacuation_progress, hand_over, lose, unmark_lost};
use object::get;

/// Runs one of the commands.
pub async fn run(cluster: &Cluster, command: PoolCommand) -> Result<()> {
    match command {
        PoolCommand::Lose {
            pool,
            reason,
            undo,
            force,
            change,
        } => {
            let (object, pool) = get(cluster, &pool).await?;
            match undo {
                true => unmark_lost(cluster, &object, &pool, &change).await,
                false => {
                    lose(
                        cluster,
                        &object,
                        &pool,
                        &reason.unwrap_or_default(),
                        force,
                        &change,
                    )
                    .await
                }
            }
        }
        PoolCommand::Evacuate {
            pool,
            undo,
            change,
            wait,
        } => {
            let (object, pool) = get(cluster, &pool).await?;
            evacuate(cluster, &object, &pool, !undo, &change).await?;
            let what = format!("the evacuation of pool {}", pool.title());
            follow(&wait, &change, &what, || {
                evacuation_progress(cluster, &pool)
            })
            .await
        }
        PoolCommand::HandOver {
            pool,
            to_node,
            change,
        } => {
            let (object, pool) = get(cluster, &pool).await?;
            hand_over(cluster, &object, &pool, &to_node, &change).await
        }
        PoolCommand::Adopt(arguments) => {
            let (object, pool) = get(cluster, &arguments.pool).await?;
            request::adopt(cluster, &object, &pool, &arguments).await
        }
        PoolCommand::Forget(arguments) => {
            let (object, pool) = get(cluster, &arguments.pool).await?;
            request::forget(cluster, &object, &pool, &arguments).await
        }
        PoolCommand::Follow {
            pool,
            pods,
            confirmed,
        } => follow::run(cluster, pool, &pods, &confirmed).await,
    }
}
