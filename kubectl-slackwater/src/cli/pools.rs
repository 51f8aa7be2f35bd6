//! The arguments of the commands that change a pool.

use clap::{Args, Subcommand};

use super::driver::{Confirmation, Pods, parse_operand};
use super::options::{Change, Wait};

/// Changes of a pool.
#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// Mark a pool as lost: its volumes and snapshots count as deleted
    Lose {
        /// ID, NODE/NAME or name of the pool
        pool: String,
        /// Reason, which is stored in the Pool object
        #[arg(long, value_name = "TEXT", required_unless_present = "undo")]
        reason: Option<String>,
        /// Remove the mark
        #[arg(long, conflicts_with_all = ["reason", "force"])]
        undo: bool,
        /// Proceed although a node serves the pool
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        change: Change,
    },
    /// Move all volumes of a pool to other pools
    Evacuate {
        /// ID, NODE/NAME or name of the pool
        pool: String,
        /// End this, and undo moves that have not switched
        #[arg(long, conflicts_with = "wait")]
        undo: bool,
        #[command(flatten)]
        change: Change,
        #[command(flatten)]
        wait: Wait,
    },
    /// Let a pool belong to another node, to which its disk was moved
    HandOver {
        /// ID, NODE/NAME or name of the pool
        pool: String,
        /// The node
        #[arg(long, value_name = "NODE")]
        to_node: String,
        #[command(flatten)]
        change: Change,
    },
    /// Have a node adopt a pool whose disk was moved there
    Adopt(PoolAdoptArguments),
    /// Have a node forget a pool that it has lost for good: its volumes count as deleted
    Forget(PoolForgetArguments),
    /// Let the PersistentVolumes of a pool follow it to the node that has adopted it
    Follow {
        /// ID, NODE/NAME or name of the pool
        #[arg(value_parser = parse_operand)]
        pool: String,
        #[command(flatten)]
        pods: Pods,
        #[command(flatten)]
        confirmed: Confirmation,
    },
}

/// A pool that a node is to adopt.
#[derive(Clone, Debug, Args)]
pub struct PoolAdoptArguments {
    /// ID, NODE/NAME or name of the pool
    pub pool: String,
    /// The node
    #[arg(long, value_name = "NODE", required_unless_present = "undo")]
    pub to_node: Option<String>,
    /// Withdraw the request
    #[arg(long, conflicts_with_all = ["to_node", "wait"])]
    pub undo: bool,
    #[command(flatten)]
    pub change: Change,
    #[command(flatten)]
    pub wait: Wait,
}

/// A pool that a node is to forget.
#[derive(Clone, Debug, Args)]
pub struct PoolForgetArguments {
    /// ID, NODE/NAME or name of the pool
    pub pool: String,
    /// The node [default: the one that has the pool]
    #[arg(long, value_name = "NODE")]
    pub on_node: Option<String>,
    /// Withdraw the request
    #[arg(long, conflicts_with_all = ["on_node", "wait"])]
    pub undo: bool,
    #[command(flatten)]
    pub change: Change,
    #[command(flatten)]
    pub wait: Wait,
}
