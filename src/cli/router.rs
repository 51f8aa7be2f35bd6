//! The router of `slackwater serve --role controller`.

use std::sync::Arc;

use super::Failure;
use super::serve::{credentials, show_expiry};
use crate::config::{self, BadConfig, ControllerConfig, ServiceName};
use crate::hook::HookRights;
use crate::router::{
    Agents, ClusterOptions, InCluster, NoCluster, Options, Router, TlsDial, begin,
};
use crate::server;
use crate::tls::Name;

/// The default service account of the nodes' pods.
const NODE_ACCOUNT: &str = "slackwater-node";

/// Starts a router, which connects to its agents, and returns it with its cluster, which must be
/// stopped after the router.
pub(super) async fn start(
    driver_name: String,
    controller: ControllerConfig,
    options: &server::Options,
) -> Result<(Router, Option<Arc<InCluster>>), Failure> {
    let ControllerConfig {
        agents,
        tls,
        lost_after,
        recreate_ready_for,
        snapshot_schedules,
        page_port: _,
        metrics_per_volume,
    } = controller;
    let name = Name::controller().map_err(Failure::run)?;
    let given = tls.map(|files| credentials(name, files)).transpose()?;
    let of_router = Options {
        driver_name: driver_name.clone(),
        alpha: options.alpha,
        metrics: options.metrics.clone(),
    };
    match agents {
        config::Agents::At(list) => {
            let missing = || BadConfig("--tls-cert is missing".into());
            let given = given.ok_or_else(missing)?;
            show_expiry(&options.metrics, &given);
            let dial = Arc::new(TlsDial::new(given));
            let known = Arc::new(Agents::new(dial, &driver_name));
            let each = list.into_iter();
            known.set(each.map(|agent| (agent.node, agent.address.to_string())));
            Ok((Router::new(known, Arc::new(NoCluster), of_router), None))
        }
        config::Agents::Of(service) => {
            let cluster_options = ClusterOptions {
                lost_after,
                metrics_per_volume,
                ..cluster_options(&driver_name, service)
            };
            let account = std::env::var("NODE_ACCOUNT");
            let account = account.as_deref().unwrap_or(NODE_ACCOUNT);
            let begun = begin(cluster_options, given, account)
                .await
                .map_err(Failure::run)?;
            show_expiry(&options.metrics, &begun.credentials);
            let cluster = begun.cluster;
            let router = Router::new(begun.agents, cluster.clone(), of_router);
            cluster.move_volumes(Arc::new(router.clone()));
            cluster.lift_fences(Arc::new(router.clone()));
            cluster.revert_volumes(Arc::new(router.clone()));
            cluster.lift_revert_fences(Arc::new(router.clone()));
            if let Some(ready_for) = recreate_ready_for {
                cluster.recreate_claims(ready_for);
            }
            if snapshot_schedules {
                cluster.schedule_snapshots();
            }
            Ok((router, Some(cluster)))
        }
    }
}

/// The router's configuration in its cluster: it runs in the namespace of the agents' Service, and
/// its name is that of its pod.
fn cluster_options(driver_name: &str, service: ServiceName) -> ClusterOptions {
    let me = std::env::var("POD_NAME").or_else(|_| std::env::var("HOSTNAME"));
    // The name must be unique, because it distinguishes two routers.
    let me = me.unwrap_or_else(|_| uuid::Uuid::new_v4().to_string());
    // The chart's names depend on the name of the release.
    let HookRights { role, account } = HookRights::default();
    let hook_rights = HookRights {
        role: std::env::var("HOOKS_ROLE").unwrap_or(role),
        account: std::env::var("HOOKS_ACCOUNT").unwrap_or(account),
    };
    ClusterOptions {
        hook_rights,
        has_snapshotter: std::env::var("SNAPSHOTTER").as_deref() != Ok("absent"),
        agent_service: Some((service.namespace.clone(), service.name)),
        ..ClusterOptions::new(driver_name, &service.namespace, &me)
    }
}
