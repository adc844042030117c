PACKAGES := features kernels policy runtime training
.PHONY: links
links:
	@mkdir -p .types/lorazor
	@$(foreach p,$(PACKAGES),ln -sfn ../../$(p) .types/lorazor/$(p);)
