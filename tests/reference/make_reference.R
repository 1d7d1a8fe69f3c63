# What does R say? Writes r_reference.json, which the tests of geomstats_lm.statistics compare with.
#
#   Rscript tests/reference/make_reference.R tests/reference/r_reference.json
#
# Data are drawn here, rounded, and written beside the results, so that both sides see the same digits.

suppressMessages({
  library(jsonlite); library(boot); library(metafor); library(lme4)
  library(sandwich); library(clubSandwich); library(quantreg)
})
set.seed(20240402)
out <- list()
versions <- sapply(c("boot", "metafor", "lme4", "sandwich", "clubSandwich", "quantreg"),
                   function(p) as.character(packageVersion(p)))
out$versions <- as.list(c(R = as.character(getRversion()), versions))

# ---- correlations, with and without ties, and partial ones --------------------------------------
n <- 60
z1 <- round(rnorm(n), 4); z2 <- round(rnorm(n), 4)
x <- round(z1 + rnorm(n), 4); y <- round(0.6 * x + z2 + rnorm(n), 4)
tied_x <- round(x); tied_y <- round(y)
estimate <- function(a, b, method) unname(cor.test(a, b, method = method, exact = FALSE)$estimate)
ranks <- data.frame(y = rank(y), x = rank(x), z1 = rank(z1), z2 = rank(z2))
residual_y <- resid(lm(y ~ z1 + z2, ranks)); residual_x <- resid(lm(x ~ z1 + z2, ranks))
out$correlation <- list(
  data = list(x = x, y = y, z1 = z1, z2 = z2, tied_x = tied_x, tied_y = tied_y),
  spearman = estimate(x, y, "spearman"), kendall = estimate(x, y, "kendall"),
  pearson = estimate(x, y, "pearson"),
  spearman_tied = estimate(tied_x, tied_y, "spearman"),
  kendall_tied = estimate(tied_x, tied_y, "kendall"),
  spearman_partial = cor(residual_y, residual_x),
  spearman_semipartial = cor(ranks$y, residual_x)
)

# ---- bootstrap of clusters: the same resamples, the four intervals -------------------------------
clusters <- 25
cluster <- rep(seq_len(clusters), times = rep(c(3, 5, 8, 4, 6), 5))
effect <- rnorm(clusters)
bx <- round(effect[cluster] + rnorm(length(cluster)), 3)
by <- round(effect[cluster] + bx + rnorm(length(cluster)), 3)
rows <- split(seq_along(cluster), cluster)
whole <- cor(bx, by, method = "spearman")
# a second value, the variance of the first: any will do to check the studentized interval
spearman <- function(ids, index) {
  i <- unlist(rows[ids[index]])
  value <- cor(bx[i], by[i], method = "spearman")
  c(value, 0.01 + 0.02 * abs(value - whole))
}
drawn <- boot(seq_len(clusters), spearman, R = 499)
counts <- boot.array(drawn)
left_out <- sapply(seq_len(clusters), function(g) {
  i <- which(cluster != g)
  cor(bx[i], by[i], method = "spearman")
})
influence <- (mean(left_out) - left_out) * (clusters - 1)
ci <- boot.ci(drawn, type = c("perc", "basic", "bca", "stud"), L = influence)
ci_fisher <- boot.ci(drawn, index = 1, type = "basic", h = atanh, hinv = tanh)
out$bootstrap <- list(
  data = list(x = bx, y = by, cluster = cluster),
  counts = unclass(t(counts)), t0 = whole, t = drawn$t[, 1], jackknife = left_out,
  percentile = ci$percent[4:5], basic = ci$basic[4:5], bca = ci$bca[4:5],
  basic_fisher_z = ci_fisher$basic[4:5],
  variance_t0 = drawn$t0[2], variance_t = drawn$t[, 2], bootstrap_t = ci$student[4:5]
)

# ---- meta-analysis -------------------------------------------------------------------------------
k <- 12
yi <- round(rnorm(k, 0.9, 0.25), 4); vi <- round(runif(k, 0.005, 0.08), 5)
architecture <- rep(c("ssm", "transformer"), length.out = k)
parameters <- round(exp(runif(k, 16, 21)))
family <- rep(1:5, length.out = k)
tight <- list(threshold = 1e-14, maxiter = 1000)
describe <- function(fit) {
  interval <- if (fit$method == "FE") NULL else confint(fit)$random["tau^2", c("ci.lb", "ci.ub")]
  pred <- if (fit$p == 1) predict(fit) else NULL
  list(
    beta = as.vector(fit$beta), se = fit$se, p = fit$pval, low = fit$ci.lb, high = fit$ci.ub,
    tau2 = fit$tau2, tau2_interval = as.vector(interval), i2 = fit$I2, h2 = fit$H2,
    q = fit$QE, q_p = fit$QEp, qm = fit$QM, qm_p = fit$QMp,
    prediction = if (is.null(pred) || fit$method == "FE") NULL else c(pred$pi.lb, pred$pi.ub)
  )
}
meta <- list(data = list(yi = yi, vi = vi, architecture = architecture, parameters = parameters,
                         family = family))
for (method in c("FE", "DL", "PM", "REML")) {
  for (test in c("z", "knha")) {
    if (method == "FE" && test == "knha") next
    control <- if (method %in% c("REML")) tight else if (method == "PM") list(tol = 1e-14) else list()
    fit <- rma(yi, vi, method = method, test = test, control = control)
    meta[[paste(method, test, sep = "_")]] <- describe(fit)
    fit <- rma(yi, vi, mods = ~ architecture + log(parameters), method = method, test = test,
               control = control)
    meta[[paste(method, test, "moderators", sep = "_")]] <- describe(fit)
  }
}
base <- rma(yi, vi, method = "REML", control = tight)
rob <- robust(base, cluster = family, adjust = TRUE)
meta$robust <- list(beta = as.vector(rob$beta), se = rob$se, p = rob$pval, df = rob$dfs)
with_mods <- rma(yi, vi, mods = ~ architecture, method = "REML", control = tight)
rob <- robust(with_mods, cluster = family, adjust = TRUE)
meta$robust_moderators <- list(beta = as.vector(rob$beta), se = rob$se, p = rob$pval, df = rob$dfs)
knha <- rma(yi, vi, method = "REML", test = "knha", control = tight)
loo <- t(sapply(seq_len(k), function(i) {
  fit <- rma(yi[-i], vi[-i], method = "REML", test = "knha", control = tight)
  c(fit$beta, fit$se, fit$tau2)
}))
meta$leave_one_out <- list(beta = loo[, 1], se = loo[, 2], tau2 = loo[, 3])
parts <- lapply(c("ssm", "transformer"), function(a) {
  rma(yi[architecture == a], vi[architecture == a], method = "REML", test = "knha", control = tight)
})
between <- rma(sapply(parts, function(f) f$beta), sei = sapply(parts, function(f) f$se), method = "FE")
meta$subgroups <- list(beta = sapply(parts, function(f) f$beta), se = sapply(parts, function(f) f$se),
                       tau2 = sapply(parts, function(f) f$tau2), q = between$QE, p = between$QEp)
homogeneous <- c(0.5, 0.51, 0.49, 0.5, 0.505); precise <- c(0.02, 0.03, 0.02, 0.05, 0.04)
meta$no_heterogeneity <- c(describe(rma(homogeneous, precise, method = "REML", test = "knha",
                                        control = tight)),
                           list(yi = homogeneous, vi = precise))
out$meta <- meta

# ---- least squares: CR1, CR2 with Satterthwaite degrees of freedom -------------------------------
groups <- rep(seq_len(11), times = c(2, 3, 9, 4, 6, 12, 5, 3, 7, 8, 4))
ox <- round(rnorm(length(groups)), 3)
level <- round(rnorm(11), 3)[groups]
kind <- c("a", "b", "c")[(seq_along(groups) %% 3) + 1]
oy <- round(1 + 0.5 * ox + level + rnorm(11)[groups] + rnorm(length(groups)), 3)
ols_data <- data.frame(y = oy, x = ox, level = level, kind = kind, g = groups)
fit <- lm(y ~ x * kind + level, ols_data)
cr2 <- coef_test(fit, vcov = "CR2", cluster = ols_data$g, test = "Satterthwaite")
out$ols <- list(
  data = ols_data, beta = unname(coef(fit)), classical_se = unname(sqrt(diag(vcov(fit)))),
  r2 = summary(fit)$r.squared, sigma = summary(fit)$sigma,
  cr1_se = unname(sqrt(diag(vcovCL(fit, cluster = ols_data$g, type = "HC1", cadjust = TRUE)))),
  cr2_se = cr2$SE, cr2_df = cr2$df, cr2_p = cr2$p_Satt
)
quantile_fit <- rq(y ~ x + level, tau = c(0.1, 0.5, 0.9), data = ols_data)
out$quantile <- list(quantiles = c(0.1, 0.5, 0.9), beta = unname(t(coef(quantile_fit))))

# ---- mixed models --------------------------------------------------------------------------------
models <- 14; documents <- 5; tokens <- 8
model <- rep(seq_len(models), each = documents * tokens)
document <- rep(rep(seq_len(documents), each = tokens), models)
mx <- round(rnorm(length(model)), 3)
b0 <- rnorm(models); b1 <- 0.4 * rnorm(models) + 0.3 * b0
d0 <- 0.6 * rnorm(models * documents); d1 <- 0.3 * rnorm(models * documents)
inner <- (model - 1) * documents + document
my <- round(2 + b0[model] + (1 + b1[model]) * mx + d0[inner] + d1[inner] * mx +
              0.7 * rnorm(length(model)), 3)
mixed_data <- data.frame(y = my, x = mx, model = model, document = document)
strict <- lmerControl(optimizer = "bobyqa", optCtrl = list(rhoend = 1e-10, maxfun = 1e5))
formulas <- c(
  intercept = "y ~ x + (1 | model)",
  slope = "y ~ x + (1 + x | model)",
  nested = "y ~ x + (1 | model) + (1 | model:document)",
  nested_slope = "y ~ x + (1 + x | model) + (1 | model:document)",
  uncorrelated = "y ~ x + (1 + x || model) + (1 | model:document)",
  slash = "y ~ x + (1 | model/document)",
  crossed = "y ~ x + (1 | model) + (1 | document)"
)
mixed <- list(data = mixed_data)
for (name in names(formulas)) {
  for (reml in c(TRUE, FALSE)) {
    fit <- lmer(as.formula(formulas[[name]]), mixed_data, REML = reml, control = strict)
    parts <- as.data.frame(VarCorr(fit))
    mixed[[paste0(name, if (reml) "" else "_ml")]] <- list(
      formula = formulas[[name]], reml = reml, beta = unname(fixef(fit)),
      se = unname(sqrt(diag(as.matrix(vcov(fit))))), sigma = sigma(fit),
      log_likelihood = as.numeric(logLik(fit)),
      group = parts$grp, first = parts$var1, second = parts$var2, value = parts$sdcor
    )
  }
}
out$mixed <- mixed

# ---- multiple testing ----------------------------------------------------------------------------
p <- c(0.001, 0.008, 0.039, NA, 0.041, 0.042, 0.06, 0.074, 0.205, NA, 0.212, 0.216, 0.222, 0.251, 1)
out$adjust <- list(p = p)
for (method in c("BH", "BY", "holm", "hochberg", "hommel", "bonferroni")) {
  out$adjust[[method]] <- p.adjust(p, method)
}

target <- commandArgs(trailingOnly = TRUE)[1]
write(toJSON(out, digits = NA, auto_unbox = TRUE, na = "null", null = "null"), target)
