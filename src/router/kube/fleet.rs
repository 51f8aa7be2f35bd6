//! The router's own agents, as what is placed by EndpointSlices and asked for reports.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::SystemTime;

use k8s_openapi::jiff::Timestamp;

use super::Fleet;
use super::picture::Report;
use crate::router::agents::Agents;

impl Fleet for Agents {
    fn place(&self, agents: BTreeMap<String, SocketAddr>) {
        let each = agents.into_iter();
        self.set(each.map(|(node, address)| (node, address.to_string())));
    }

    fn reports(&self) -> Vec<Report> {
        let each = self.all().into_iter();
        each.map(|agent| {
            let seen = agent.seen();
            let at = seen.answered.and_then(|at| {
                // By the wall clock, as others read it.
                let at = SystemTime::now().checked_sub(at.elapsed())?;
                Timestamp::try_from(at).ok()
            });
            Report {
                node: agent.node().to_string(),
                seen: at.zip(seen.told),
                problem: seen.problem,
            }
        })
        .collect()
    }
}
