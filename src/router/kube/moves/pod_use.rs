//! How a pod uses the volume of a claim.

use k8s_openapi::api::core::v1::Pod;

use super::decide::PodUse;

/// A pod that has ended does not use its volumes any more.
pub(super) fn has_ended(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// What a move has to know of a pod.
pub(super) fn used(pod: &Pod) -> PodUse {
    let status = pod.status.as_ref();
    let each = status.iter().flat_map(|status| {
        let init = status.init_container_statuses.iter().flatten();
        init.chain(status.container_statuses.iter().flatten())
    });
    let mut each = each;
    let has_started = each.any(|one| {
        let state = one.state.as_ref();
        one.restart_count > 0
            || state.is_some_and(|state| state.running.is_some() || state.terminated.is_some())
    });
    let spec = pod.spec.as_ref();
    PodUse {
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        node: spec
            .and_then(|spec| spec.node_name.clone())
            .filter(|node| !node.is_empty()),
        has_started,
    }
}
